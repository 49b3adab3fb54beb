"""The best that every split of the devices gives, without a solver: alternatives, and the curve over splits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flowtrain.allocator.candidates import Candidate
from flowtrain.allocator.flow import Choice, FlowProblem, Levels, levels
from flowtrain.allocator.pareto import FloatArray


@dataclass(frozen=True, slots=True)
class Split:
    """One consumer configuration with the producers that serve it best, and what that is worth."""

    choice: Choice
    levels: Levels


def best_splits(problem: FlowProblem) -> tuple[Split, ...]:
    """Return the largest rate of each of the consumer's configurations that leaves devices for all producers.

    Producers take the smallest configurations that sustain the rate. For one type of devices and one module a work,
    where production falls as the consumer grows and a sorted search is exact; empty for anything else, and where
    nothing is feasible.
    """
    if len(problem.devices) != 1 or len(problem.shares) != len(problem.producers):
        return ()
    if not problem.producers or not all(module.candidates for module in problem.producers):
        return ()
    (count,) = problem.devices.values()
    fronts = {
        module.name: sorted(module.candidates, key=lambda candidate: candidate.rate) for module in problem.producers
    }
    productions = {
        module.name: np.array([c.rate for c in fronts[module.name]]) / problem.shares[module.work]
        for module in problem.producers
    }
    reachable = np.unique(np.concatenate(list(productions.values())))
    reachable = reachable[reachable <= min(production[-1] for production in productions.values())]
    needed = sum(
        np.array([c.devices for c in fronts[name]])[np.searchsorted(production, reachable)]
        for name, production in productions.items()
    )
    splits = []
    for consumer in problem.consumer:
        affordable = int(np.searchsorted(needed, count - consumer.devices, side="right")) - 1
        if affordable >= 0:
            rate = min(consumer.rate, float(reachable[affordable]))
            choice = Choice(_slowest_enough(fronts, productions, rate), consumer)
            splits.append(Split(choice, levels(problem, choice)))
    return tuple(splits)


def _slowest_enough(
    fronts: Mapping[str, list[Candidate]], productions: Mapping[str, FloatArray], rate: float
) -> dict[str, Candidate]:
    return {name: front[int(np.searchsorted(productions[name], rate))] for name, front in fronts.items()}
