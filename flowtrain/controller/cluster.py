"""The Ray cluster: connecting or starting one, checking what it has, placing actors."""

from __future__ import annotations

import logging
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
    namespace = f"flowtrain-{config.name}"
    if address := os.environ.get("RAY_ADDRESS"):
        try:
            ray.init(namespace=namespace, log_to_driver=True)
        except ConnectionError as error:
            raise ResourceError(
                f"no Ray cluster answers at RAY_ADDRESS ({address}): {error}; unset it to train on this machine alone"
            ) from error
    else:
        ray.init(
            address="local",
            namespace=namespace,
            num_cpus=os.cpu_count(),
            include_dashboard=config.observability.dashboard,
            dashboard_host="127.0.0.1",
            log_to_driver=True,
        )
    try:
        yield
    finally:
        ray.shutdown()


def check_resources(bundles: Sequence[Bundle], pool_nbytes: int) -> None:
    """Raise ResourceError, with all counts, when the cluster lacks what the actors need."""
    have = ray.cluster_resources()
    lacking = []
    for resource in sorted({name for bundle in bundles for name in bundle}):
        need = sum(bundle.get(resource, 0.0) for bundle in bundles)
        if need > have.get(resource, 0.0) + 1e-9:
            lacking.append(f"{resource}: {need:g} needed, {have.get(resource, 0.0):g} in the cluster")
    if not lacking:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        homeless = [bundle for bundle in bundles if not any(_fits(bundle, node) for node in nodes)]
        if homeless:
            lacking.append(f"no single node has {_counts(homeless[0])}, which one actor needs")
    if pool_nbytes > have.get("memory", 0.0):
        lacking.append(f"memory for pool segments: {pool_nbytes} bytes needed, {have.get('memory', 0.0):.0f} there")
    if lacking:
        raise ResourceError(
            "the cluster lacks resources: " + "; ".join(lacking) + ". Lower encoders.*.data_parallel_size, "
            "backbone.data_parallel_size, their num_cpus or the segment sizes, or add nodes"
        )


@contextmanager
def placed(bundles: Sequence[Bundle], timeout_s: float) -> Iterator[PlacementGroup]:
    """Reserve one bundle per actor, packed on as few nodes as possible, for as long as the context lasts.

    Raises ResourceError, with what is free, when the reservation does not come within ``timeout_s``.
    """
    group = placement_group(list(bundles), strategy="PACK")
    try:
        if not group.wait(timeout_s):
            free = ray.available_resources()
            names = sorted({name for bundle in bundles for name in bundle})
            needed = {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in names}
            raise ResourceError(
                f"no placement for {len(bundles)} actors within limits.placement_timeout_s ({timeout_s:g} s): "
                f"{_counts(needed)} needed, {_counts({name: free.get(name, 0.0) for name in names})} free now; another "
                "job may hold the rest"
            )
        yield group
    finally:
        remove_placement_group(group)


def _fits(bundle: Bundle, node: Bundle) -> bool:
    return all(amount <= node.get(name, 0.0) + 1e-9 for name, amount in bundle.items())


def _counts(amounts: Bundle) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items())
