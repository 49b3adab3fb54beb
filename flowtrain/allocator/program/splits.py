"""The best that every split of the devices gives, without a solver: alternatives, and the curve over splits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flowtrain.allocator.candidates import Candidate
from flowtrain.allocator.program.flow import Choice, FlowProblem, Levels, levels
from flowtrain.costs.flops import FloatArray, IntArray

_USEFUL = 2.0
"""Production up to so many times the fastest consumer is worth showing."""


@dataclass(frozen=True, slots=True)
class Split:
    """One consumer configuration with the producers that serve it best, and what that is worth."""

    choice: Choice
    levels: Levels
    production: float
    """Samples/s that the producers reach with all devices that the consumer leaves."""


@dataclass(frozen=True, slots=True, eq=False)
class Production:
    """What producers can reach together."""

    reachable: FloatArray
    """Samples/s of the whole data, ascending; ``[N]``."""
    needed: IntArray
    """Devices that they need for it; ``[N]``."""
    fronts: Mapping[str, list[Candidate]]
    """By module, its configurations, ascending in rate."""
    rates: Mapping[str, FloatArray]
    """By module, the samples/s that each of ``fronts`` keeps up with."""

    def slowest_enough(self, rate: float) -> dict[str, Candidate]:
        """Return the smallest configuration of each producer that sustains a rate."""
        return {name: front[int(np.searchsorted(self.rates[name], rate))] for name, front in self.fronts.items()}


def production_of(problem: FlowProblem) -> Production | None:
    """Return what producers can make on one type of devices with one module a work; None of anything else."""
    if len(problem.devices) != 1 or len(problem.shares) != len(problem.producers):
        return None
    if not problem.producers or not all(module.candidates for module in problem.producers):
        return None
    fronts = {
        module.name: sorted(module.candidates, key=lambda candidate: candidate.rate) for module in problem.producers
    }
    productions = {
        module.name: np.array([c.rate for c in fronts[module.name]]) / problem.shares[module.work]
        for module in problem.producers
    }
    reachable = np.unique(np.concatenate(list(productions.values())))
    reachable = reachable[reachable <= min(production[-1] for production in productions.values())]
    needed = np.zeros(len(reachable), dtype=np.int64)
    for name, production in productions.items():
        needed += np.array([c.devices for c in fronts[name]])[np.searchsorted(production, reachable)]
    return Production(reachable, needed, fronts, productions)


def best_splits(problem: FlowProblem) -> tuple[Split, ...]:
    """Return the largest rate of each of the consumer's configurations that leaves devices for all producers.

    Producers take the smallest configurations that sustain the rate. For one type of devices and one module a work,
    where production falls as the consumer grows and a sorted search is exact; empty for anything else, and where
    nothing is feasible.
    """
    made = production_of(problem)
    if made is None:
        return ()
    (count,) = problem.devices.values()
    splits = []
    for consumer in problem.consumer:
        affordable = int(np.searchsorted(made.needed, count - consumer.devices, side="right")) - 1
        if affordable >= 0:
            production = float(made.reachable[affordable])
            choice = Choice(made.slowest_enough(min(consumer.rate, production)), consumer)
            splits.append(Split(choice, levels(problem, choice), production))
    return tuple(splits)


def production_curve(problem: FlowProblem) -> tuple[tuple[int, float], ...]:
    """Return devices of all producers and the samples/s that they make on these, as far as a consumer could use it.

    Empty where ``best_splits`` is.
    """
    made = production_of(problem)
    if made is None or not problem.consumer:
        return ()
    useful = _USEFUL * max(candidate.rate for candidate in problem.consumer)
    at = (made.reachable <= useful) | (np.arange(len(made.reachable)) == 0)
    return tuple(zip(made.needed[at].tolist(), made.reachable[at].tolist(), strict=True))
