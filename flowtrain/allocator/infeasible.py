"""Why a request has no feasible allocation, and the smallest changes that would make one feasible."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from flowtrain.allocator.candidates import (
    Candidate,
    Enumeration,
    PruneReason,
)
from flowtrain.allocator.program.flow import FlowProblem
from flowtrain.allocator.program.milp import fewest_missing_devices
from flowtrain.allocator.program.solvers import Solver
from flowtrain.allocator.request import Key, Request, enumerate_all, flow_problem
from flowtrain.allocator.sharing import can_share, fits_shared
from flowtrain.allocator.surrogate import BACKBONE
from flowtrain.costs.cluster import Cluster
from flowtrain.errors import ConfigError
from flowtrain.types.run_plan import BackboneSettings

MAX_DEVICES = 1 << 14
"""Larger clusters are not suggested."""
_WHOLE_NODES = 64
MIN_BATCH_PATCHES = 256
"""Smaller encoder batches are not suggested: this is one image of 224 pixels with patches of 14."""


def infeasible(
    request: Request, enumerations: Mapping[Key, Enumeration], problem: FlowProblem, solver: Solver
) -> ConfigError:
    """Return the error that names the constraint that nothing satisfies, and the changes that would help."""
    for module in (*request.model.encoders, BACKBONE):
        each = {device_type: found for (name, device_type), found in enumerations.items() if name == module}
        if not any(len(found) for found in each.values()):
            return _no_configuration(request, module, each)
    missing = fewest_missing_devices(problem, solver)
    assert missing, "every module has a configuration and the devices suffice"
    have = ", ".join(f"{count} {name}" for name, count in problem.devices.items())
    more = " and ".join(f"{count} {name}" for name, count in missing.items())
    return ConfigError(
        f"the devices ({have}) hold each module alone but not all of them together; the nearest feasible choice: "
        f"{more} more"
    )


def _no_configuration(request: Request, module: str, found: Mapping[str, Enumeration]) -> ConfigError:
    label = module if module == BACKBONE else f"encoders.{module}"
    ways = list(_ways_out(request, module))
    reasons = [
        f"on {request.cluster.counts[name]} {name}: {_last_reason(request, module, name, each)}"
        for name, each in found.items()
    ]
    way = f"feasible with {'; or with '.join(ways)}"
    if not ways:
        way = (
            f"not even {MAX_DEVICES} devices or full recomputation are enough: take devices with more memory, a "
            "smaller model or a smaller scheduler.microbatch_tokens"
        )
    return ConfigError(f"{label} has no feasible configuration ({'; '.join(reasons)}); {way}")


def _last_reason(request: Request, module: str, device_type: str, found: Enumeration) -> str:
    if found.least_peak_nbytes is not None:
        return (
            f"{PruneReason.MEMORY}, the smallest needs {found.least_peak_nbytes / 2**30:.1f} GiB of "
            f"{request.memory_nbytes(module, device_type) / 2**30:.1f} GiB"
        )
    return ", ".join(str(reason) for reason in found.pruned)


def _ways_out(request: Request, module: str) -> Iterator[str]:
    """Single changes that make the request feasible; if none does, more devices together with full recomputation.

    What the request may choose anyway is no way out.
    """
    recomputed = _changed(request, activation_checkpointing="full")
    may_recompute = module == BACKBONE and request.setup.activation_checkpointing != "full"
    may_recompute &= "activation_checkpointing" not in _chosen(request)
    found = False
    if module == BACKBONE:
        for key, changed in _leaner_settings(request):
            if _is_feasible(changed):
                yield f"backbone.{key}"
                found = True
    of_batches = (_larger_batches(request), _smaller_batches(request)) if module == BACKBONE else ()
    for changes in of_batches or (_smaller_encode_batches(request, module),):
        nearest = next((key for key, changed in changes if _is_feasible(changed)), None)
        if nearest is not None:
            yield nearest
            found = True
    larger = _smallest_cluster(request)
    if larger is not None:
        yield _named(larger)
        found = True
    if found or not may_recompute:
        return
    larger = _smallest_cluster(recomputed)
    if larger is not None:
        yield f"backbone.activation_checkpointing=full on {_named(larger)}"


def _chosen(request: Request) -> set[str]:
    """The fields of ``BackboneSettings`` among whose values the request may choose."""
    names = [each.name for each in fields(BackboneSettings)]
    return {name for name in names if len({getattr(each, name) for each in request.choices}) > 1}


def _leaner_settings(request: Request) -> Iterator[tuple[str, Request]]:
    """Settings of the backbone that take less memory than the present ones, one at a time."""
    setup, chosen = request.setup, _chosen(request)
    if setup.gradient_reduction == "step" and not request.chooses_reduction:
        yield "gradient_reduction=microbatch", _changed(request, gradient_reduction="microbatch")
    for word in ("full", "offload") if "activation_checkpointing" not in chosen else ():
        if setup.activation_checkpointing != word:
            yield f"activation_checkpointing={word}", _changed(request, activation_checkpointing=word)
    if not setup.sequence_parallel:
        yield "sequence_parallel=true", _changed(request, sequence_parallel=True)
    if setup.sharding != "full" and "sharding" not in chosen:
        yield "sharding=full", _changed(request, sharding="full", shard_size=None)
    if setup.sharding == "gradients" and "sharding" not in chosen:
        yield "sharding=hybrid", _changed(request, sharding="hybrid", shard_size=None)


def _changed(request: Request, **settings: Any) -> Request:
    return replace(request, setup=replace(request.setup, **settings))


def _larger_batches(request: Request) -> Iterator[tuple[str, Request]]:
    """Larger global batches, which feed more replicas."""
    batch = 2 * request.workload.global_batch_size
    while batch < 2 * request.cluster.num_devices:
        workload = replace(request.workload, global_batch_size=batch)
        yield f"training.global_batch_size={batch}", replace(request, workload=workload)
        batch *= 2


def _smaller_batches(request: Request) -> Iterator[tuple[str, Request]]:
    longest, tokens = int(request.workload.lengths.max()), request.workload.microbatch_tokens // 2
    while tokens >= longest and "microbatch_tokens" not in _chosen(request):
        workload = replace(request.workload, microbatch_tokens=tokens)
        choices = tuple(replace(each, microbatch_tokens=tokens) for each in request.choices)
        yield f"scheduler.microbatch_tokens={tokens}", replace(request, workload=workload, choices=choices)
        tokens //= 2


def _smaller_encode_batches(request: Request, module: str) -> Iterator[tuple[str, Request]]:
    patches = request.max_batch_patches[module] // 2
    while patches >= MIN_BATCH_PATCHES:
        limits = {**request.max_batch_patches, module: patches}
        yield f"encoders.{module}.max_batch_patches={patches}", replace(request, max_batch_patches=limits)
        patches //= 2


def _smallest_cluster(request: Request) -> Cluster | None:
    """The smallest feasible cluster: a multiple of this one; with one type of device, refined by devices or nodes.

    Above ``_WHOLE_NODES`` devices it has whole nodes.
    """
    factor = 2
    while not _is_feasible(larger := _times(request, factor)):
        factor *= 2
        if factor * request.cluster.num_devices > MAX_DEVICES:
            return None
    if len(request.cluster.device_types) > 1:
        return larger.cluster
    (device_type,) = request.cluster.device_types
    grain = device_type.devices_per_node if factor * device_type.count > _WHOLE_NODES else 1
    low, high = factor // 2 * device_type.count // grain, -(-factor * device_type.count // grain)
    while high - low > 1:  # more devices never make a feasible request infeasible
        middle = (low + high) // 2
        sized = replace(request, cluster=Cluster((replace(device_type, count=middle * grain),)))
        low, high = (low, middle) if _is_feasible(sized) else (middle, high)
    return Cluster((replace(device_type, count=high * grain),))


def _named(cluster: Cluster) -> str:
    if len(cluster.device_types) == 1:
        nodes, rest = divmod(cluster.num_devices, cluster.device_types[0].devices_per_node)
        in_nodes = cluster.num_devices > _WHOLE_NODES and not rest
        return f"{cluster.num_devices} devices{f' ({nodes} nodes)' if in_nodes else ''}"
    return " and ".join(f"{count} {name}" for name, count in cluster.counts.items())


def _times(request: Request, factor: int) -> Request:
    types = tuple(replace(each, count=each.count * factor) for each in request.cluster.device_types)
    return replace(request, cluster=Cluster(types))


def _is_feasible(request: Request) -> bool:
    """Whether the devices suffice for the smallest configurations; rates do not matter."""
    smallest = {key: _smallest(each) for key, each in enumerate_all(request).items()}
    problem = flow_problem(request, smallest)
    if can_share(request, problem):
        return fits_shared(request)
    return fewest_missing_devices(problem) == {}


def _smallest(found: Enumeration) -> tuple[Candidate, ...]:
    every = [columns.candidate(int(columns.devices.argmin()), 1.0) for columns in found.every if len(columns)]
    return (min(every, key=lambda each: each.devices),) if every else ()
