"""What a cluster has for a run: nodes, memory, transports as measured, and whether the run's pool fits."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flowtrain.allocator.plan import requirements
from flowtrain.config.run import RunConfig
from flowtrain.controller import cluster
from flowtrain.controller.actor_specs import actor_specs_of, bundles_of
from flowtrain.controller.prepare import RunSpec, check_memory, prepare
from flowtrain.errors import ConfigError, FlowTrainError, ResourceError
from flowtrain.mempool.host import host_memory
from flowtrain.mempool.probe import Probe, slow_links
from flowtrain.models.families.registry import family_from_config
from flowtrain.types.memory import HostMemory, Link, Tier
from flowtrain.types.run_plan import Plan

DOCTOR_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One node."""

    name: str
    node_id: str
    num_cpus: float
    """As Ray counts them."""
    num_devices: float
    """As Ray counts them."""
    devices: tuple[str, ...]
    """Names of the device types."""
    ray_memory_nbytes: int
    """As Ray counts it."""
    memory: HostMemory
    tiers: tuple[Tier, ...] = (Tier.DRAM,)
    """Tiers of the memory pool that this version can have there."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that the run needs of the cluster, and whether the cluster has it."""

    name: str
    fits: bool
    detail: str


@dataclass(frozen=True)
class DoctorReport:
    """What was found. pool_nbytes: all segments of the run together."""

    run: str
    pool_nbytes: int
    nodes: tuple[NodeReport, ...]
    links: tuple[Link, ...]
    checks: tuple[Check, ...]
    warnings: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the run can have its pool here."""
        return all(check.fits for check in self.checks)

    def as_record(self) -> dict[str, Any]:
        """The report as JSON has it."""
        return {"schema": DOCTOR_SCHEMA, "fits": self.fits, **asdict(self)}


class NodeProbe(Probe):
    """A probe that also describes its node; an actor that reserves no resources."""

    def describe(self) -> tuple[str, HostMemory]:
        """Return the host's name and memory."""
        return socket.gethostname(), host_memory()


def examine(config: RunConfig) -> DoctorReport:
    """Look at the cluster that the run would use; starts a local one if ``RAY_ADDRESS`` names none.

    Raises ConfigError or DataError if the run could not work on any cluster, ResourceError if none answers.
    """
    run_spec = prepare(config, check_pool=False)
    with cluster.connected(config):
        found = [node for node in ray.nodes() if node["Alive"]]
        with _probes(found, config.pool.network != "none") as probes:
            nodes = _describe(found, probes, config.limits.start_limit_s)
            links = _measure(nodes, probes, config.limits.start_limit_s)
        return judge(run_spec, nodes, links)


def judge(run_spec: RunSpec, nodes: Sequence[NodeReport], links: Sequence[Link]) -> DoctorReport:
    """Compare what was found, and Ray's counts of the cluster, with what the run needs."""
    config = run_spec.config
    plan = run_spec.plan if any(node.num_devices for node in nodes) else run_spec.plan.without_devices()
    segments = [spec.segment_nbytes for spec in actor_specs_of(plan)]
    resources, may_spread = _resources(config, plan)
    checks = (_step(run_spec), resources, _node_memory(nodes, segments, may_spread))
    warnings = (*slow_links(links), *_locked_memory(nodes, max(segments)))
    return DoctorReport(config.name, sum(segments), tuple(nodes), tuple(links), checks, warnings)


def _step(run_spec: RunSpec) -> Check:
    name, config = "a step fits the pool", run_spec.config
    try:
        run_spec.feeder_need.check(run_spec.plan.feeder.segment_nbytes, config.pool.max_segment_nbytes)
        check_memory(config, family_from_config(config), run_spec.num_eval)
    except ConfigError as error:
        return Check(name, False, str(error))
    return Check(name, True, f"a worst-case step of {config.training.global_batch_size} samples fits its segments")


def _resources(config: RunConfig, plan: Plan) -> tuple[Check, bool]:
    """Check what Ray counts; also returns whether the actors may be on several nodes."""
    name, needs = "the cluster has the resources", requirements(plan)
    try:
        strategy = cluster.check_resources(bundles_of(actor_specs_of(plan)), needs.pool_nbytes, config.pool.network)
    except ResourceError as error:
        return Check(name, False, str(error)), False
    detail = f"{needs.num_actors} actors with {needs.num_cpus:g} CPUs and {needs.num_devices:g} devices"
    return Check(name, True, detail), strategy != "STRICT_PACK"


def _node_memory(nodes: Sequence[NodeReport], segments: Sequence[int], may_spread: bool) -> Check:
    """Check that the segments have room: all on one node, or spread over nodes if the network joins them."""
    available = [node.memory.available_nbytes for node in nodes]
    most, pool_nbytes = max(available), sum(segments)
    if may_spread:
        fits = pool_nbytes <= sum(available) and max(segments) <= most
        room = f"{len(nodes)} nodes have {sum(available)} bytes available, {most} of them on one"
    else:
        fits = pool_nbytes <= most
        room = f"node {nodes[available.index(most)].name} has {most} bytes available"
    detail = f"segments of {pool_nbytes} bytes in all; {room}"
    return Check("there is memory for it", fits, detail if fits else f"{detail}; {cluster.POOL_WAYS_OUT}")


def _locked_memory(nodes: Sequence[NodeReport], segment_nbytes: int) -> Iterator[str]:
    """Warn if the limit on locked memory is too low to page-lock a segment or register it for RDMA."""
    for node in nodes:
        limit = node.memory.memlock_nbytes
        if node.num_devices and limit is not None and limit < segment_nbytes:
            yield (
                f"node {node.name} lets a process lock {limit} bytes (ulimit -l), a segment has {segment_nbytes}: "
                "raise memlock in /etc/security/limits.conf, or RDMA fails or is slow"
            )


# --- probes ----------------------------------------------------------------------------------------------------------

Pair = tuple[ActorHandle, ActorHandle]


@contextmanager
def _probes(nodes: Sequence[dict[str, Any]], network: bool) -> Iterator[list[Pair]]:
    """Two probes on each node."""
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


def _describe(nodes: Sequence[dict[str, Any]], probes: Sequence[Pair], timeout_s: float) -> tuple[NodeReport, ...]:
    answers = _answers([first.describe.remote() for first, _ in probes], timeout_s)
    names = [name for name, _ in answers]
    prefix, reports = cluster.ACCELERATOR_TYPE, []
    for node, (name, memory) in zip(nodes, answers, strict=True):
        resources = node["Resources"]
        reports.append(
            NodeReport(
                name=name if names.count(name) == 1 else f"{name}-{node['NodeID'][:6]}",
                node_id=node["NodeID"],
                num_cpus=resources.get("CPU", 0.0),
                num_devices=resources.get("GPU", 0.0),
                devices=tuple(key.removeprefix(prefix) for key in resources if key.startswith(prefix)),
                ray_memory_nbytes=int(resources.get("memory", 0.0)),
                memory=memory,
            )
        )
    return tuple(reports)


def _measure(nodes: Sequence[NodeReport], probes: Sequence[Pair], timeout_s: float) -> tuple[Link, ...]:
    """Measure one link after another: on each node, and from each node to the next in a ring."""
    names = {node.node_id: node.name for node in nodes}
    links: list[Link] = []
    for number, (owner, reader) in enumerate(probes):
        neighbour = probes[(number + 1) % len(probes)][1]
        pairs = [(reader, reader), (owner, reader), *([(owner, neighbour)] if len(probes) > 1 else [])]
        for source, destination in pairs:
            (export,) = _answers([source.export.remote()], timeout_s)
            (measured,) = _answers([destination.measure.remote(export)], timeout_s)
            links += [replace(x, source=names[x.source], destination=names[x.destination]) for x in measured]
    return tuple(links)


def _answers(calls: list[ray.ObjectRef[Any]], timeout_s: float) -> list[Any]:
    """Wait for probes. Raises ResourceError if one does not answer."""
    try:
        return ray.get(calls, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise ResourceError(
            f"a probe did not answer within limits.start_timeout_s ({timeout_s:g} s); a node may hang, or lack room "
            "for a worker process"
        ) from error
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, FlowTrainError):
            raise error.cause from error
        raise
    except ray.exceptions.RayActorError as error:
        raise ResourceError(f"a probe could not run on its node: {error}") from error
