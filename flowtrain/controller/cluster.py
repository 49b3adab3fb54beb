"""The Ray cluster: connecting or starting one, checking what it has, placing actors."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from flowtrain.config.run import RunConfig
from flowtrain.errors import ResourceError

logger = logging.getLogger(__name__)

Bundle = dict[str, float]


@contextmanager
def connected(config: RunConfig) -> Iterator[None]:
    """Connect to the cluster that RAY_ADDRESS names, or start a local one that ends with this process.

    Token authentication is left as Ray has it (on). The dashboard of a local one listens on localhost alone.
    """
    if ray.is_initialized():
        yield
        return
    try:
        _connect(config)
    except ray.exceptions.AuthenticationError as error:
        raise ResourceError(f"Ray refuses to start without its token: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _connect(config: RunConfig) -> None:
    namespace = f"flowtrain-{config.name}"
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        ray.init(
            address="local",
            namespace=namespace,
            num_cpus=os.cpu_count(),
            include_dashboard=config.observability.dashboard,
            dashboard_host="127.0.0.1",
            log_to_driver=True,
            logging_level=logging.ERROR,  # its advice here is to switch token authentication off
        )
        return
    try:
        ray.init(namespace=namespace, log_to_driver=True)
    except ConnectionError as error:
        raise ResourceError(
            f"no Ray cluster answers at RAY_ADDRESS ({address}), or it refuses this process's token: {error}; set "
            "RAY_AUTH_MODE=token and give the cluster's token (~/.ray/auth_token or RAY_AUTH_TOKEN_PATH), or unset "
            "RAY_ADDRESS to train on this machine alone"
        ) from error


def check_resources(bundles: Sequence[Bundle], pool_nbytes: int) -> None:
    """Raise ResourceError, with all counts, when the cluster lacks what the actors need."""
    have = ray.cluster_resources()
    lacking = []
    for resource, need in _total(bundles).items():
        if need > have.get(resource, 0.0) + 1e-9:
            lacking.append(f"{resource}: {need:g} needed, {have.get(resource, 0.0):g} in the cluster")
    if not lacking:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        total = _total(bundles)
        if not any(_fits(total, node) for node in nodes):
            lacking.append(
                f"no single node has {_counts(total)}, and all actors must share one, since the memory pool has no "
                "transport between nodes yet"
            )
    if pool_nbytes > have.get("memory", 0.0):
        lacking.append(f"memory for pool segments: {pool_nbytes} bytes needed, {have.get('memory', 0.0):.0f} there")
    if lacking:
        raise ResourceError(
            "the cluster lacks resources: " + "; ".join(lacking) + ". Lower encoders.*.data_parallel_size, "
            "backbone.data_parallel_size, their num_cpus or the segment sizes, or use a larger node"
        )


@contextmanager
def placed(bundles: Sequence[Bundle], timeout_s: float) -> Iterator[PlacementGroup]:
    """Reserve one bundle per actor, all on one node, for as long as the context lasts.

    Raises ResourceError, with what is free, when the reservation does not come within ``timeout_s``.
    """
    # The memory pool has no transport between nodes yet.
    group = placement_group(list(bundles), strategy="STRICT_PACK")
    try:
        if not group.wait(math.ceil(timeout_s)):  # Ray counts whole seconds
            free = ray.available_resources()
            needed = _total(bundles)
            left = {name: free.get(name, 0.0) for name in needed}
            raise ResourceError(
                f"no placement for {len(bundles)} actors within limits.placement_timeout_s ({timeout_s:g} s): "
                f"{_counts(needed)} needed, {_counts(left)} free now; another job may hold the rest"
            )
        yield group
    finally:
        remove_placement_group(group)


def _total(bundles: Sequence[Bundle]) -> Bundle:
    return {name: sum(b.get(name, 0.0) for b in bundles) for name in sorted({name for b in bundles for name in b})}


def _fits(bundle: Bundle, node: Bundle) -> bool:
    return all(amount <= node.get(name, 0.0) + 1e-9 for name, amount in bundle.items())


def _counts(amounts: Bundle) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items())
