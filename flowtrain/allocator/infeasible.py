"""Why nothing is feasible, and the nearest changes that would make it so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from flowtrain.allocator.candidates import Enumeration, PruneReason
from flowtrain.allocator.cluster import Cluster
from flowtrain.allocator.flow import FlowProblem
from flowtrain.allocator.milp import fewest_missing_devices
from flowtrain.allocator.request import Key, Request, enumerate_module
from flowtrain.allocator.solvers import Solver
from flowtrain.allocator.surrogate import BACKBONE
from flowtrain.errors import ConfigError

MAX_DEVICES = 1 << 14
"""Larger clusters are not suggested."""


def infeasible(
    request: Request, enumerations: Mapping[Key, Enumeration], problem: FlowProblem, solver: Solver
) -> ConfigError:
    """Return the error that says which constraint leaves nothing, and what would."""
    for module in (*request.model.encoders, BACKBONE):
        each = {device_type: found for (name, device_type), found in enumerations.items() if name == module}
        if not any(len(found.columns) for found in each.values()):
            return _no_configuration(request, module, each)
    missing = fewest_missing_devices(problem, solver)
    assert missing, "every module has a configuration and the devices suffice"
    have = ", ".join(f"{count} {name}" for name, count in problem.devices.items())
    more = " and ".join(f"{count} {name}" for name, count in missing.items())
    return ConfigError(
        f"the devices ({have}) hold each module alone but not all of them together; the nearest that is feasible: "
        f"{more} more"
    )


def _no_configuration(request: Request, module: str, found: Mapping[str, Enumeration]) -> ConfigError:
    label = module if module == BACKBONE else f"encoders.{module}"
    reasons = [
        f"on {request.cluster.counts[device_type]} {device_type}: {_last_reason(request, device_type, each)}"
        for device_type, each in found.items()
    ]
    ways = list(_ways_out(request, module))
    way = f"feasible with {'; or with '.join(ways)}"
    if not ways:
        way = (
            f"not even {MAX_DEVICES} devices or full recomputation would do: take devices with more memory, a smaller "
            "model or a smaller scheduler.microbatch_tokens"
        )
    return ConfigError(f"{label} has no feasible configuration ({'; '.join(reasons)}); {way}")


def _last_reason(request: Request, device_type: str, found: Enumeration) -> str:
    if found.least_peak_nbytes is not None:
        return (
            f"{PruneReason.MEMORY}, the least that any takes is {found.least_peak_nbytes / 2**30:.1f} GiB of "
            f"{request.memory_nbytes(device_type) / 2**30:.1f} GiB"
        )
    return ", ".join(str(reason) for reason in found.pruned)


def _ways_out(request: Request, module: str) -> Iterator[str]:
    """Single changes that give the module a configuration, then more devices together with full recomputation."""
    recomputed = replace(request, setup=replace(request.setup, activation_checkpointing="full"))
    already = request.setup.activation_checkpointing == "full" or module != BACKBONE
    found = False
    if not already and _is_feasible(recomputed, module):
        yield "backbone.activation_checkpointing=full"
        found = True
    for key, changed in _smaller_batches(request, module):
        if _is_feasible(changed, module):
            yield key
            found = True
            break
    for larger in _larger(request):
        if _is_feasible(larger, module):
            yield f"{larger.cluster.num_devices} devices"
            found = True
            break
    if found or already:
        return
    for larger in _larger(recomputed):
        if _is_feasible(larger, module):
            yield f"backbone.activation_checkpointing=full on {larger.cluster.num_devices} devices"
            return


def _smaller_batches(request: Request, module: str) -> Iterator[tuple[str, Request]]:
    if module == BACKBONE:
        longest, tokens = int(request.workload.lengths.max()), request.workload.microbatch_tokens // 2
        while tokens >= longest:
            yield (
                f"scheduler.microbatch_tokens={tokens}",
                replace(request, workload=replace(request.workload, microbatch_tokens=tokens)),
            )
            tokens //= 2
        return
    patches = request.max_batch_patches[module] // 2
    while patches >= 256:
        limits = {**request.max_batch_patches, module: patches}
        yield f"encoders.{module}.max_batch_patches={patches}", replace(request, max_batch_patches=limits)
        patches //= 2


def _larger(request: Request) -> Iterator[Request]:
    """The same cluster with 2, 4, 8, ... times the devices, at least whole nodes."""
    factor = 2
    while factor * request.cluster.num_devices <= MAX_DEVICES:
        types = tuple(replace(each, count=each.count * factor) for each in request.cluster.device_types)
        yield replace(request, cluster=Cluster(types))
        factor *= 2


def _is_feasible(request: Request, module: str) -> bool:
    return any(len(enumerate_module(request, module, each).columns) for each in request.cluster.device_types)
