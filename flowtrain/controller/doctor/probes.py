"""Processes on each node that describe it and measure links; actors that reserve nothing."""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import ray
from huggingface_hub import constants
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import flowtrain
from flowtrain.controller import cluster
from flowtrain.controller.doctor.report import NodeReport
from flowtrain.controller.mps import lacks_mps
from flowtrain.errors import FlowTrainError, ResourceError
from flowtrain.mempool.host import host_memory
from flowtrain.mempool.probe import Probe
from flowtrain.mempool.transports.nixl_agent import nixl_module
from flowtrain.models.hub import HubFetch
from flowtrain.types.memory import HostMemory
from flowtrain.types.nodes import HubModel, NodeFacts

Pair = tuple[ActorHandle, ActorHandle]
"""Two probes of one node."""

_PACKAGES = ("torch", "transformers", "ray")
_RDMA_DEVICES = Path("/sys/class/infiniband")
_CLOCK_ROUNDS = 9


class NodeProbe(Probe):
    """A probe that also describes its node."""

    def describe(self) -> tuple[str, HostMemory]:
        """Return the host's name and memory."""
        return socket.gethostname(), host_memory()

    def clock(self) -> float:
        """Return the node's wall clock."""
        return time.time()

    def facts(self, runs_dir: str, mark: str, text: str, models: Sequence[HubModel]) -> NodeFacts:
        """Return what this node has. mark: a file in ``runs_dir`` with ``text``, which the driver wrote."""
        hub = HubFetch(models)
        to_fetch_nbytes, no_hub = hub.lacking()
        cache = existing(Path(constants.HF_HUB_CACHE))
        return NodeFacts(
            versions=versions(),
            sees_runs_dir=_text_of(Path(runs_dir, mark)) == text,
            can_write=os.access(runs_dir, os.W_OK | os.X_OK),
            has_rdma=_RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir()),
            cache_free_nbytes=shutil.disk_usage(cache).free,
            to_fetch_nbytes=to_fetch_nbytes,
            no_hub=no_hub,
            lacks_mps=lacks_mps(),
        )


def versions() -> dict[str, str | None]:
    """Return the versions that must be equal on all nodes, of this process."""
    module = nixl_module()
    found: dict[str, str | None] = {"python": platform.python_version(), "flowtrain": flowtrain.__version__}
    found |= {name: _version(name) for name in _PACKAGES}
    return found | {"nixl": _version(module.replace("_", "-")) if module is not None else None}


def existing(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    return next(each for each in (path, *path.parents) if each.exists())


@contextmanager
def probes(nodes: Sequence[dict[str, Any]], network: bool) -> Iterator[list[Pair]]:
    """Two probes on each node. network: try the network between them."""
    run_id = f"doctor-{secrets.token_hex(4)}"
    num_processes = 2 * len(nodes)
    remote: Any = ray.remote(NodeProbe)
    actors: list[ActorHandle] = []
    try:
        for index in range(num_processes):
            node_id = nodes[index // 2]["NodeID"]
            where = NodeAffinitySchedulingStrategy(node_id, soft=False)
            probe = remote.options(num_cpus=0, scheduling_strategy=where)
            actors.append(probe.remote(run_id, index, node_id, num_processes, network))
        yield list(zip(actors[::2], actors[1::2], strict=True))
    finally:
        for actor in actors:
            ray.kill(actor, no_restart=True)


def describe(
    nodes: Sequence[dict[str, Any]],
    pairs: Sequence[Pair],
    runs_dir: Path,
    models: Sequence[HubModel],
    timeout_s: float,
) -> tuple[NodeReport, ...]:
    """Ask each node what it has. runs_dir: as configured; its nearest parent that exists is looked at."""
    first = [pair[0] for pair in pairs]
    described = answers([probe.describe.remote() for probe in first], timeout_s)
    names = [name for name, _ in described]
    with _mark(existing(runs_dir)) as (mark, text):
        where = str(existing(runs_dir))
        seen = answers([probe.facts.remote(where, mark, text, models) for probe in first], timeout_s)
    prefix, reports = cluster.ACCELERATOR_TYPE, []
    for node, probe, (name, memory), facts in zip(nodes, first, described, seen, strict=True):
        resources = node["Resources"]
        clock_s, clock_error_s = _clock(probe, timeout_s)
        reports.append(
            NodeReport(
                name=name if names.count(name) == 1 else f"{name}-{node['NodeID'][:6]}",
                node_id=node["NodeID"],
                num_cpus=resources.get("CPU", 0.0),
                num_devices=resources.get("GPU", 0.0),
                devices=tuple(key.removeprefix(prefix) for key in resources if key.startswith(prefix)),
                ray_memory_nbytes=int(resources.get("memory", 0.0)),
                memory=memory,
                facts=replace(facts, clock_s=clock_s, clock_error_s=clock_error_s),
            )
        )
    return tuple(reports)


def answers(calls: Sequence[ray.ObjectRef[Any]], timeout_s: float) -> list[Any]:
    """Wait for probes. Raises ResourceError if one does not answer."""
    try:
        return ray.get(list(calls), timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise ResourceError(
            f"a probe did not answer within limits.start_timeout_s ({timeout_s:g} s); a node may hang, or lack room "
            "for a worker process"
        ) from error
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, FlowTrainError):
            raise error.cause from error
        raise
    except ray.exceptions.RayError as error:  # it died, or its node did before it started
        raise ResourceError(f"a probe could not run on its node: {error}") from error


def _clock(probe: ActorHandle, timeout_s: float) -> tuple[float, float]:
    """Return a node's clock minus this process's, and the error, by the fastest round trip (as NTP does)."""
    best = (0.0, float("inf"))
    for _ in range(_CLOCK_ROUNDS):
        sent = time.time()
        (there,) = answers([probe.clock.remote()], timeout_s)
        received = time.time()
        half = (received - sent) / 2
        best = min(best, (there - sent - half, half), key=lambda measured: measured[1])
    return best


@contextmanager
def _mark(folder: Path) -> Iterator[tuple[str, str]]:
    """A file in a folder, by which nodes show that they see it; absent where this process may not write."""
    name, text = f".flowtrain-doctor-{secrets.token_hex(4)}", secrets.token_hex(8)
    file = folder / name
    try:
        file.write_text(text)
    except OSError:
        yield name, text
        return
    try:
        yield name, text
    finally:
        file.unlink(missing_ok=True)


def _text_of(file: Path) -> str | None:
    try:
        return file.read_text()
    except OSError:
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
