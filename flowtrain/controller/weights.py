"""Fetches a run's models from the hub, once a node, before any actor waits for another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flowtrain.actors.link import node_address
from flowtrain.config.run import RunConfig
from flowtrain.controller.watch import StopRequested
from flowtrain.errors import FlowTrainError, ResourceError, StallError
from flowtrain.models.hub import HubFetch, hub_models
from flowtrain.types.nodes import FetchState, HubModel

TICK_S = 1.0
SHOWN_EVERY_S = 5.0
WAYS_OUT = (
    "give the node access to the hub (HF_TOKEN for a private model), put HF_HOME on a file system that all nodes "
    "share, or set HF_HUB_OFFLINE=1 and name a local directory of the model that every node sees"
)


class NodeFetch(HubFetch):
    """``HubFetch`` as an actor on a node; it reserves nothing."""

    def address(self) -> str:
        """Return the node's address."""
        return node_address()


@dataclass
class _Node:
    """One node's download."""

    fetch: ActorHandle
    name: str
    state: FetchState = field(default_factory=lambda: FetchState(0, None))
    moved_s: float = 0.0
    """When it last had more bytes, on the monotonic clock."""


def fetch_weights(
    config: RunConfig,
    group: PlacementGroup | None,
    resumes: bool,
    show: Callable[[str], None],
    stop: threading.Event,
) -> None:
    """Fetch what a run's actors read from the hub to the nodes that they are placed on; raises as ``fetch_models``.

    resumes: from a checkpoint, which has all weights but those of frozen modules.
    """
    models = hub_models(config, with_backbone=not resumes or bool(config.model.freeze))
    fetch_models(models, nodes_of(group), config.limits.stall_timeout_s, show, stop)


def nodes_of(group: PlacementGroup | None) -> list[str]:
    """Return the ids of the nodes that a run's actors are placed on; all nodes without a placement group."""
    if group is None:
        return [str(node["NodeID"]) for node in ray.nodes() if node["Alive"]]
    return sorted(set(placement_group_table(group)["bundles_to_node_id"].values()))


def fetch_models(
    models: Sequence[HubModel],
    node_ids: Sequence[str],
    stall_timeout_s: float,
    show: Callable[[str], None],
    stop: threading.Event | None = None,
) -> None:
    """Download models into the cache of each node, all nodes at the same time.

    stall_timeout_s: the longest that a node may go without another byte. show: shows the progress.
    Raises ResourceError, naming node and model, StallError, or StopRequested when ``stop`` is set.
    """
    if not models:
        return
    remote: Any = ray.remote(NodeFetch)
    actors: list[ActorHandle] = []
    try:
        for node_id in node_ids:
            there = NodeAffinitySchedulingStrategy(node_id, soft=False)
            options = remote.options(num_cpus=0, max_concurrency=2, scheduling_strategy=there)
            actors.append(options.remote(models))
        addresses = _answers([actor.address.remote() for actor in actors], node_ids, stall_timeout_s)
        names = [
            address if addresses.count(address) == 1 else f"{address} ({node_id[:6]})"
            for address, node_id in zip(addresses, node_ids, strict=True)
        ]
        now_s = time.monotonic()
        nodes = [_Node(actor, name, moved_s=now_s) for actor, name in zip(actors, names, strict=True)]
        _check_same(models, _watch(models, nodes, stall_timeout_s, show, stop))
    finally:
        for actor in actors:
            ray.kill(actor, no_restart=True)


def _watch(
    models: Sequence[HubModel],
    nodes: Sequence[_Node],
    stall_timeout_s: float,
    show: Callable[[str], None],
    stop: threading.Event | None,
) -> dict[str, Mapping[str, str]]:
    """Wait for all downloads; returns each node's commits."""
    running: dict[ray.ObjectRef[Any], _Node] = {node.fetch.fetch.remote(): node for node in nodes}
    commits: dict[str, Mapping[str, str]] = {}
    shown_s = 0.0
    while running:
        done, _ = ray.wait(list(running), num_returns=1, timeout=TICK_S)
        for ref in done:
            node = running.pop(ref)
            (commits[node.name],) = _answers([ref], [node.name], stall_timeout_s)
        if stop is not None and stop.is_set():
            raise StopRequested
        states = {node.name: node.fetch.state.remote() for node in running.values()}
        answers = _answers(list(states.values()), list(states), stall_timeout_s)
        for node, state in zip(running.values(), answers, strict=True):
            _note(node, state, stall_timeout_s, models)
        if running and time.monotonic() - shown_s >= SHOWN_EVERY_S:
            shown_s = time.monotonic()
            show(progress_text(models, {node.name: node.state for node in nodes}, set(commits)))
    return commits


def _note(node: _Node, state: FetchState, stall_timeout_s: float, models: Sequence[HubModel]) -> None:
    now_s = time.monotonic()
    if state.done_nbytes > node.state.done_nbytes or state.total_nbytes != node.state.total_nbytes:
        node.moved_s = now_s
    node.state = state
    if now_s - node.moved_s > stall_timeout_s:
        raise StallError(
            f"node {node.name} got no byte of {_names(models)} for limits.stall_timeout_s ({stall_timeout_s:g} s), "
            f"{state.done_nbytes} bytes are there; {WAYS_OUT}"
        )


def progress_text(models: Sequence[HubModel], states: Mapping[str, FetchState], done: set[str]) -> str:
    """Return a line with the bytes of each node that is not done."""
    parts = []
    for name, state in states.items():
        if name not in done:
            total = "?" if state.total_nbytes is None else f"{state.total_nbytes / 1e9:.2f}"
            parts.append(f"{name} {state.done_nbytes / 1e9:.2f} of {total} GB")
    return f"fetching {_names(models)} ({len(done)} of {len(states)} nodes done): {', '.join(parts)}"


def _names(models: Sequence[HubModel]) -> str:
    return ", ".join(model.repo_id for model in models)


def _answers(calls: Sequence[ray.ObjectRef[Any]], nodes: Sequence[str], timeout_s: float) -> list[Any]:
    """Wait for calls, one of each node; an error names the node."""
    found = []
    for call, node in zip(calls, nodes, strict=True):
        try:
            found.append(ray.get(call, timeout=timeout_s))
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, FlowTrainError):
                raise ResourceError(f"node {node}: {error.cause}; {WAYS_OUT}") from error
            raise
        except ray.exceptions.GetTimeoutError as error:
            raise StallError(
                f"node {node}: the process that fetches the models did not answer within limits.stall_timeout_s "
                f"({timeout_s:g} s); the node may hang, or lack room for a process"
            ) from error
        except ray.exceptions.RayError as error:  # it died, or its node did before it started
            raise ResourceError(f"node {node}: the process that fetches the models was lost: {error}") from error
    return found


def _check_same(models: Sequence[HubModel], commits: Mapping[str, Mapping[str, str]]) -> None:
    """Raise ResourceError if nodes have other commits of a model: ranks would start from other weights."""
    for model in models:
        found = {node: each[model.repo_id] for node, each in commits.items()}
        if len(set(found.values())) > 1:
            listed = ", ".join(f"{node} has {commit}" for node, commit in found.items())
            raise ResourceError(
                f"{model.key}: nodes have different commits of {model.repo_id!r} ({listed}); let all of them reach the "
                "hub, or put HF_HOME on a file system that they share"
            )
