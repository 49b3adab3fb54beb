"""The best choice for every split of the devices, without a solver: alternatives, and the curve over splits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flowtrain.allocator.candidates import Candidate
from flowtrain.allocator.program.flow import Choice, FlowProblem, Levels, levels
from flowtrain.costs.flops import FloatArray, IntArray

_USEFUL = 2.0
"""Production is shown up to this many times the fastest consumer's rate."""


@dataclass(frozen=True, slots=True)
class Split:
    """One consumer configuration with its best producers, and the value of this choice."""

    choice: Choice
    levels: Levels
    production: float
    """Samples/s that the producers reach with all devices that the consumer does not use."""
    fullest: Choice | None = None
    """The choice with the producers that reach ``production``; None: not known."""
    is_varied: bool = False
    """It is here for variety: the best of its kind."""


@dataclass(frozen=True, slots=True, eq=False)
class Production:
    """The rates that all producers can reach together."""

    reachable: FloatArray
    """Samples/s of the whole data, ascending; ``[N]``."""
    needed: IntArray
    """Devices that they need for each rate; ``[N]``."""
    fronts: Mapping[str, list[Candidate]]
    """Configurations by module, ascending in rate."""
    rates: Mapping[str, FloatArray]
    """Samples/s of the whole data that each configuration of ``fronts`` can keep up with, by module."""

    def slowest_enough(self, rate: float) -> dict[str, Candidate]:
        """Return the smallest configuration of each producer that sustains a rate."""
        return {name: front[int(np.searchsorted(self.rates[name], rate))] for name, front in self.fronts.items()}


def production_of(problem: FlowProblem) -> Production | None:
    """Return what producers can reach on one type of device with one module per work; None for any other problem."""
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
    """Return the best split for each of the consumer's configurations that leaves devices for all producers.

    Producers get the smallest configurations that sustain the rate. This needs one type of device and one module per
    work: then production falls as the consumer grows, and a sorted search is exact. Empty for any other problem, and if
    nothing is feasible.
    """
    reach = production_of(problem)
    if reach is None:
        return ()
    (count,) = problem.devices.values()
    splits = []
    for consumer in problem.consumer:
        affordable = int(np.searchsorted(reach.needed, count - consumer.devices, side="right")) - 1
        if affordable >= 0:
            production = float(reach.reachable[affordable])
            choice = Choice(reach.slowest_enough(min(consumer.rate, production)), consumer)
            fullest = Choice(reach.slowest_enough(production), consumer)
            splits.append(Split(choice, levels(problem, choice), production, fullest))
    return tuple(splits)


def production_curve(problem: FlowProblem) -> tuple[tuple[int, float], ...]:
    """Return (devices of all producers, samples/s that they produce on these), up to ``_USEFUL`` times any demand.

    Empty for the problems that ``best_splits`` does not cover, and without a consumer.
    """
    reach = production_of(problem)
    if reach is None or not problem.consumer:
        return ()
    useful = _USEFUL * max(candidate.rate for candidate in problem.consumer)
    at = (reach.reachable <= useful) | (np.arange(len(reach.reachable)) == 0)
    return tuple(zip(reach.needed[at].tolist(), reach.reachable[at].tolist(), strict=True))
