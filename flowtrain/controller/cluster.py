"""The Ray cluster: connecting or starting one, checking what it has, placing actors."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flowtrain.config.run import RunConfig
from flowtrain.controller import local_ray
from flowtrain.errors import ResourceError
from flowtrain.mempool.transports.nixl_agent import NIXL_INSTALL, nixl_module
from flowtrain.types.run_plan import Plan

logger = logging.getLogger(__name__)

Bundle = dict[str, float]
Network = Literal["auto", "none", "nixl"]
Strategy = Literal["STRICT_PACK", "PACK"]

ACCELERATOR_TYPE = "accelerator_type:"
"""Prefix of a resource that a node with accelerators of a type has: one, however many accelerators it has."""

POOL_WAYS_OUT = (
    "a segment counts in full, as a worst case, although its unused pages take no memory: lower data.max_image_nbytes, "
    "data.shuffle_blocks, training.global_batch_size, data.num_feeders or encoders.*.segment_nbytes (docs/running.md)"
)

_NO_CLUSTER = (ray.exceptions.AuthenticationError, ConnectionError, RuntimeError, TimeoutError, ValueError)
"""What ``ray.init`` raises when it cannot connect."""

_dashboard: ContextVar[str | None] = ContextVar("dashboard", default=None)
"""Of the cluster that an outer ``connected`` has connected to: ``mode: auto`` plans on the one that it trains on."""

PROBE_TIMEOUT_S = 180.0
"""How long a node may take to answer whether it has NIXL; most of it is the start of a Ray worker, from a shared file
system perhaps."""


@contextmanager
def connected(config: RunConfig) -> Iterator[str | None]:
    """Connect to the cluster that RAY_ADDRESS names, or start a local one that ends with this process.

    Yields where the dashboard listens, ``host:port``; None if there is none, or if somebody else has connected. Inside
    another such block it takes part in that one's connection.

    Token authentication is left as Ray has it (on). The dashboard of a local one listens on localhost alone, only its
    owner can read its token, and its temporary directory goes with it.
    """
    if ray.is_initialized():
        yield _dashboard.get()
        return
    if not sys.stderr.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # what actors print goes to a file, where colours are rubbish
    with local_ray.quiet():
        session, dashboard = _connect(config)
    outer = _dashboard.set(dashboard)
    try:
        yield dashboard
    finally:
        _dashboard.reset(outer)
        with local_ray.bounded_end(session, "the end of Ray"):
            ray.shutdown()
        if session is not None:
            local_ray.remove_session(session)


def _connect(config: RunConfig) -> tuple[Path | None, str | None]:
    """Return the temporary directory of a local cluster, None if it is another's; and where the dashboard listens."""
    namespace = f"flowtrain-{config.name}"
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        local_ray.keep_token_private(os.environ, creates=_has_tokens_by_default())
        try:
            started: Any = ray.init(
                address="local",
                namespace=namespace,
                num_cpus=os.cpu_count(),
                include_dashboard=config.observability.dashboard,
                dashboard_host="127.0.0.1",
                log_to_driver=True,
                logging_level=logging.ERROR,  # its advice here is to switch token authentication off
            )
        except Exception as error:  # of a start that takes too long Ray raises nothing narrower
            local_ray.mark_failed_session()
            raise ResourceError(
                f"Ray does not start on this machine: {_first_line(error)}; look at the free memory, the room in /tmp "
                "and in /dev/shm, and the limits of processes and open files (ulimit -a)"
            ) from error
        session = Path(started.address_info["session_dir"])
        local_ray.mark_session(session)
        local_ray.remove_dead_sessions(session.parent)
        return session, started.address_info.get("webui_url") or None
    try:
        found: Any = ray.init(namespace=namespace, log_to_driver=True, logging_level=logging.ERROR)
    except _NO_CLUSTER as error:
        raise ResourceError(
            f"no Ray cluster answers at RAY_ADDRESS ({address}), or it refuses this process's token: "
            f"{_first_line(error)}; set "
            "RAY_AUTH_MODE=token and give the cluster's token (~/.ray/auth_token or RAY_AUTH_TOKEN_PATH), or unset "
            "RAY_ADDRESS to train on this machine alone"
        ) from error
    local_ray.warn_of_open_token(os.environ)
    return None, found.address_info.get("webui_url") or None


def _first_line(error: Exception) -> str:
    """What Ray says, without its advice, which is to switch token authentication off."""
    said = error.message if isinstance(error, ray.exceptions.AuthenticationError) else str(error)
    return next((line.strip() for line in said.splitlines() if line.strip()), type(error).__name__)


def _has_tokens_by_default() -> bool:
    """Whether this Ray gives every local cluster a token."""
    major, minor = ray.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (2, 59)


def check_resources(bundles: Sequence[Bundle], pool_nbytes: int, network: Network = "none") -> Strategy:
    """Return how the bundles may be spread: over several nodes only if the pool's network joins them.

    pool_nbytes: all segments together. network: ``pool.network``.
    Raises ResourceError, with all counts, if the cluster lacks what the actors need.
    """
    have, nodes = ray.cluster_resources(), [node for node in ray.nodes() if node["Alive"]]
    lacking = []
    for resource, need in total(bundles).items():
        if not _is_type(resource) and need > have.get(resource, 0.0) + 1e-9:
            lacking.append(f"{resource}: {need:g} needed, {have.get(resource, 0.0):g} in the cluster")
    lacking += _lacking_types(bundles)
    why_one = None
    if not lacking:
        why_one = _why_one_node(nodes, network)
        for bundle in bundles if why_one is None else [total(bundles)]:
            if not any(_fits(bundle, node["Resources"]) for node in nodes):
                reason = "" if why_one is None else f", and all actors must share one: {why_one}"
                lacking.append(f"no single node has {counts_text(bundle)}{reason}")
                break
    memory, where = have.get("memory", 0.0), "in the cluster"
    if why_one is not None:
        memory, where = max(node["Resources"].get("memory", 0.0) for node in nodes), "on the largest node"
    if pool_nbytes > memory:
        lacking.append(f"memory for pool segments: {pool_nbytes} bytes needed, {memory:.0f} {where}; {POOL_WAYS_OUT}")
    if network == "nixl" and why_one is not None:
        lacking.append(f"pool.network is nixl, but {why_one}")
    if lacking:
        if len(nodes) == 1 and not os.environ.get("RAY_ADDRESS"):
            lacking.append("RAY_ADDRESS is not set, so only this machine is used: set it (auto on a cluster's node)")
        raise ResourceError(
            "the cluster lacks resources: " + "; ".join(lacking) + ". Lower data_parallel_size, "
            "tensor_parallel_size (whose ranks share a node) or pipeline_parallel_size of encoders.* or backbone, "
            "or their num_cpus, or use a larger node"
        )
    return "PACK" if why_one is None else "STRICT_PACK"


def with_devices(plan: Plan) -> Plan:
    """Plan without accelerators if the cluster has none."""
    return plan if ray.cluster_resources().get("GPU", 0) >= 1 else plan.without_devices()


def place(bundles: Sequence[Bundle], nodes: Mapping[str, Bundle]) -> tuple[dict[str, int], Bundle | None]:
    """Put bundles on as few nodes as possible, the largest first; returns the bundles of each node in use.

    nodes: what each node has, by id. Also returns a bundle that no node has room for, or None. Pure.
    """
    left, placed = {node: dict(has) for node, has in nodes.items()}, dict.fromkeys(nodes, 0)
    for bundle in sorted(bundles, key=lambda each: sum(each.values()), reverse=True):
        node = next((node for node, has in left.items() if _fits(bundle, has)), None)
        if node is None:
            return {node: count for node, count in placed.items() if count}, bundle
        placed[node] += 1
        for name, amount in bundle.items():
            left[node][name] -= amount
    return {node: count for node, count in placed.items() if count}, None


def with_network(config: RunConfig, group: PlacementGroup | None) -> RunConfig:
    """Replace ``pool.network: auto`` by what the actors need: NIXL if their bundles are on several nodes."""
    if config.pool.network != "auto":
        return config
    nodes = set(placement_group_table(group)["bundles_to_node_id"].values()) if group is not None else set()
    if len(nodes) > 1:
        logger.warning(
            "the actors are on %d nodes; the pool joins these by NIXL, whose ports ask for no token: keep the network "
            "between the nodes private, and name its interface in UCX_NET_DEVICES",
            len(nodes),
        )
    pool = config.pool.model_copy(update={"network": "nixl" if len(nodes) > 1 else "none"})
    return config.model_copy(update={"pool": pool})


@contextmanager
def placed(bundles: Sequence[Bundle], timeout_s: float, strategy: Strategy = "STRICT_PACK") -> Iterator[PlacementGroup]:
    """Reserve bundles, each on one node, for as long as the context lasts, on as few nodes as the strategy allows.

    Raises ResourceError, with what is free, if Ray does not reserve them within ``timeout_s``.
    """
    group = placement_group(list(bundles), strategy=strategy)
    try:
        if not group.wait(math.ceil(timeout_s)):  # Ray counts whole seconds
            free = ray.available_resources()
            needed = total(bundles)
            left = {name: free.get(name, 0.0) for name in needed}
            raise ResourceError(
                f"no placement for {len(bundles)} groups of actors within limits.placement_timeout_s "
                f"({timeout_s:g} s): {counts_text(needed)} needed, {counts_text(left)} free now; another job may hold "
                "the rest"
            )
        yield group
    finally:
        remove_placement_group(group)


def alive_nodes() -> set[str]:
    """Return the ids of the cluster's nodes that Ray counts as alive."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def _why_one_node(nodes: Sequence[dict[str, Any]], network: Network) -> str | None:
    """Why all actors must share a node; None if the pool's network joins all nodes."""
    if network == "none":
        return "pool.network is none (nixl or auto lets the pool join nodes, on a network that you trust)"
    if network == "auto" and len(nodes) == 1:
        return "the cluster has one node"
    probe: Any = ray.remote(nixl_module)
    answers = {}
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        answers[node["NodeID"]] = probe.options(num_cpus=0, scheduling_strategy=there).remote()
    ready, _ = ray.wait(list(answers.values()), num_returns=len(answers), timeout=PROBE_TIMEOUT_S)
    silent = [node_id for node_id, answer in answers.items() if answer not in ready]
    lacking = [node_id for node_id, answer in answers.items() if answer in ready and not _has_nixl(answer)]
    if silent or lacking:  # a node that was just lost counts as alive for some seconds
        alive = alive_nodes()
        silent, lacking = ([node_id for node_id in each if node_id in alive] for each in (silent, lacking))
    found = []
    if lacking:
        found.append(f"NIXL ({NIXL_INSTALL}) is missing on {len(lacking)} of {len(nodes)} nodes: {', '.join(lacking)}")
    if silent:
        found.append(
            f"{len(silent)} of {len(nodes)} nodes did not answer within {PROBE_TIMEOUT_S:g} s whether they have NIXL "
            f"(a node that is busy, or whose file system is slow; try again): {', '.join(silent)}"
        )
    return "; ".join(found) or None


def _has_nixl(answer: Any) -> bool:
    try:
        return ray.get(answer) is not None
    except ray.exceptions.RayError as error:  # the node is gone, or has no FlowTrain
        logger.warning("a node could not be asked for NIXL: %s", error)
        return False


def _lacking_types(bundles: Sequence[Bundle]) -> list[str]:
    """What is missing of each accelerator type; the type's own resource is no count, so the GPUs of its nodes count."""
    lacking = []
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    there = sorted({name.removeprefix(ACCELERATOR_TYPE) for node in nodes for name in node if _is_type(name)})
    for resource in sorted({name for bundle in bundles for name in bundle if _is_type(name)}):
        need = sum(bundle.get("GPU", 0.0) for bundle in bundles if resource in bundle)
        have = sum(node.get("GPU", 0.0) for node in nodes if resource in node)
        if need > have + 1e-9:
            known = f" (accelerator_type can be {' or '.join(there)} here)" if there and not have else ""
            lacking.append(f"GPU of {resource}: {need:g} needed, {have:g} in the cluster{known}")
    return lacking


def _is_type(resource: str) -> bool:
    return resource.startswith(ACCELERATOR_TYPE)


def total(bundles: Sequence[Bundle]) -> Bundle:
    """Return what bundles need together."""
    return {name: sum(b.get(name, 0.0) for b in bundles) for name in sorted({name for b in bundles for name in b})}


def _fits(bundle: Bundle, node: Bundle) -> bool:
    return all(amount <= node.get(name, 0.0) + 1e-9 for name, amount in bundle.items())


def counts_text(amounts: Bundle) -> str:
    """Return amounts of resources as a message has them."""
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items())
