"""The best choices with another configuration of the consumer, for problems that ``splits`` does not cover."""

from __future__ import annotations

from dataclasses import replace

from flowtrain.allocator.candidates import Candidate
from flowtrain.allocator.program.flow import FlowProblem, production
from flowtrain.allocator.program.milp import solve
from flowtrain.allocator.program.reduction import reduce
from flowtrain.allocator.program.solvers import Solver
from flowtrain.allocator.program.splits import Split


def rivals(problem: FlowProblem, chosen: Candidate, solver: Solver, count: int) -> tuple[Split, ...]:
    """Return the best choice of each of the ``count`` best other consumers, by rate; any types of devices and works.

    Solves one program per consumer, fastest first, until the remaining consumers alone are slower than the choices
    found.
    """
    found: list[Split] = []
    for consumer in sorted(reduce(problem).consumer, key=lambda candidate: -candidate.rate):
        if consumer == chosen:
            continue
        if len(found) == count and consumer.rate <= found[-1].levels.rate:
            break
        solution = solve(replace(problem, consumer=(consumer,)), solver)
        if solution is not None:
            produced = min(production(problem, solution.choice).values())
            found.append(Split(solution.choice, solution.levels, produced))
            found.sort(key=lambda split: (-split.levels.rate, split.levels.imbalance, split.levels.devices))
            del found[count:]
    return tuple(found)
