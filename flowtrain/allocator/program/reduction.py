"""Leaves out candidates that no optimum needs, before the solver runs: exact, and programs stay small."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from flowtrain.allocator.candidates import Candidate
from flowtrain.allocator.program.flow import FlowProblem, Module


def reduce(problem: FlowProblem) -> FlowProblem:
    """Leave out candidates that do not fit next to the other modules, and producers faster than any consumer needs."""
    if not problem.consumer:
        return problem
    problem = _fitting_with_others(problem)
    if not problem.consumer:
        return problem
    fastest = max(candidate.rate for candidate in problem.consumer)

    def keep(module: Module) -> Module:
        demand = problem.shares[module.work] * fastest
        return replace(module, candidates=_up_to(module.candidates, demand))

    return replace(problem, producers=tuple(keep(module) for module in problem.producers))


def fast_enough(problem: FlowProblem, rate: float) -> FlowProblem:
    """Leave out candidates that are too slow for ``rate``, in samples/s, which is already reached."""

    def keep(module: Module) -> Module:
        if len(problem.producers_of(module.work)) > 1 and not problem.one_producer:
            return module
        share = problem.shares[module.work]
        return replace(module, candidates=tuple(c for c in module.candidates if c.rate / share >= rate))

    return replace(
        problem,
        producers=tuple(keep(module) for module in problem.producers),
        consumer=tuple(candidate for candidate in problem.consumer if candidate.rate >= rate),
    )


def _up_to(candidates: tuple[Candidate, ...], demand: float) -> tuple[Candidate, ...]:
    """Of the candidates that cover the demand alone, keep only the best: others add devices and imbalance."""
    enough: dict[str, Candidate] = {}
    for candidate in candidates:
        if candidate.rate >= demand:
            best = enough.get(candidate.device_type)
            # On a front, the slowest sufficient candidate also has the fewest devices.
            if best is None or (candidate.rate, candidate.devices) < (best.rate, best.devices):
                enough[candidate.device_type] = candidate
    return tuple(c for c in candidates if c.rate < demand or enough[c.device_type] is c)


def _fitting_with_others(problem: FlowProblem) -> FlowProblem:
    """Leave out candidates that leave fewer devices than the other modules need."""
    if len(problem.devices) > 1:
        return problem
    (count,) = problem.devices.values()
    least = {
        module.name: min((candidate.devices for candidate in module.candidates), default=count + 1)
        for module in problem.producers
        if not module.optional
    }
    consumer_least = min(candidate.devices for candidate in problem.consumer)
    room = count - consumer_least - sum(least.values())

    def fits(least_devices: int) -> Callable[[Candidate], bool]:
        return lambda candidate: candidate.devices - least_devices <= room

    return replace(
        problem,
        producers=tuple(
            replace(module, candidates=tuple(filter(fits(least.get(module.name, 0)), module.candidates)))
            for module in problem.producers
        ),
        consumer=tuple(filter(fits(consumer_least), problem.consumer)),
    )
