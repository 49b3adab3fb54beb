"""Allocation without matching, for ablations: each side gets devices first, and then its best degrees for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flowtrain.allocator.candidates import Candidate
from flowtrain.allocator.program.flow import Choice, FlowProblem, levels
from flowtrain.allocator.program.milp import Solution
from flowtrain.allocator.request import Key, Request
from flowtrain.allocator.surrogate import BACKBONE
from flowtrain.config.allocator import AllocationMethod
from flowtrain.errors import ConfigError


def solve_split(
    request: Request, problem: FlowProblem, fronts: Mapping[Key, tuple[Candidate, ...]], method: AllocationMethod
) -> Solution:
    """Return the choice of ``even`` or ``flops``; ConfigError if a side has no configuration for its devices."""
    if len(request.cluster.device_types) > 1:
        names = ", ".join(request.cluster.counts)
        raise ConfigError(
            f"allocator.method ({method!r}) splits devices of one type, and there are several ({names}); name one "
            "--device, or set allocator.method=milp"
        )
    (device_type,) = request.cluster.device_types
    counts = split_devices(request, method)
    chosen = {name: _best(fronts[name, device_type.name], count) for name, count in counts.items()}
    for name, candidate in chosen.items():
        if candidate is None:
            raise _too_few(name, counts, fronts[name, device_type.name], method)
    found = {name: candidate for name, candidate in chosen.items() if candidate is not None}
    choice = Choice({name: found[name] for name in request.model.encoders}, found[BACKBONE])
    return Solution(choice, levels(problem, choice), method, 0)


def split_devices(request: Request, method: AllocationMethod) -> dict[str, int]:
    """Return the number of devices of each encoder and the backbone; at least one each, all of them in use.

    even: half for all encoders together, the odd device to the backbone. flops: by the FLOPs of a mean sample, rounded
    to the nearest; the sum is kept by the largest remainders.
    """
    names, total = tuple(request.model.encoders), request.cluster.num_devices
    if total <= len(names):
        raise ConfigError(
            f"allocator.method ({method!r}) needs a device for each module: {len(names) + 1}, and there are {total}; "
            "raise --devices, or set allocator.method=milp"
        )
    if method == "even":
        for_encoders = max(total // 2, len(names))
        each = _apportioned([1.0] * len(names), for_encoders)
        return {**dict(zip(names, each, strict=True)), BACKBONE: total - for_encoders}
    workload, model = request.workload, request.model
    flops = workload.flops(model)
    shares = [workload.share(name) * workload.encoder_flops(model, name) for name in names]
    shares.append(float((flops.backbone + flops.connector).mean()))
    return dict(zip((*names, BACKBONE), _apportioned(shares, total), strict=True))


def _apportioned(weights: Sequence[float], total: int) -> list[int]:
    """Divide ``total`` by weight, by largest remainder, after one for each."""
    ideal = [weight / sum(weights) * total for weight in weights]
    counts = [max(1, int(each)) for each in ideal]
    while sum(counts) != total:
        step = 1 if sum(counts) < total else -1
        movable = [at for at, count in enumerate(counts) if count + step >= 1]
        counts[max(movable, key=lambda at: step * (ideal[at] - counts[at]))] += step
    return counts


def _best(candidates: Sequence[Candidate], count: int) -> Candidate | None:
    """The fastest on at most so many devices; on fewer where no more help."""
    affordable = [each for each in candidates if each.devices <= count]
    return max(affordable, key=lambda each: (each.rate, -each.devices), default=None)


def _too_few(
    name: str, counts: Mapping[str, int], candidates: Sequence[Candidate], method: AllocationMethod
) -> ConfigError:
    label = BACKBONE if name == BACKBONE else f"encoders.{name}"
    least = min(each.devices for each in candidates)
    return ConfigError(
        f"allocator.method ({method!r}) gives {label} {counts[name]} of {sum(counts.values())} devices, and its "
        f"smallest configuration that fits needs {least}; raise --devices, or set allocator.method=milp"
    )
