"""Eq. 2 of FlowTrain 3.3 as a mixed-integer linear program: rate, then flow imbalance, then devices.

Three programs, one per level, are solved in sequence. Each level's optimum becomes a constraint of the next level. The
optimum is computed again from the chosen candidates' rates and devices for this: solvers report values that are wrong
in the last digits (CBC prints eight), and a level pinned to those can be infeasible or wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pulp

from flowtrain.allocator.candidates import Candidate
from flowtrain.allocator.program.flow import Choice, FlowProblem, Levels, levels
from flowtrain.allocator.program.reduction import fast_enough, reduce
from flowtrain.allocator.program.solvers import Solver

PIN_TOLERANCE = 1e-6
"""How far a later level may miss an earlier one, relative to the consumer's largest rate; as the solvers' tolerance."""


@dataclass(frozen=True, slots=True)
class Solution:
    """The optimum."""

    choice: Choice
    levels: Levels
    """The value of the choice."""
    solver: str
    """The solver that found it."""
    num_variables: int
    """Variables of the largest program."""


def solve(problem: FlowProblem, solver: Solver | None = None) -> Solution | None:
    """Return the lexicographic optimum; None if the devices are not enough for one configuration per module."""
    solver = solver if solver is not None else Solver()
    problem = reduce(problem)
    first = _Program(problem, "rate")
    first.maximise_rate()
    choice = first.solve(solver)
    if choice is None:
        return None
    reached = levels(problem, choice)
    problem = fast_enough(problem, reached.rate)
    for level in ("imbalance", "devices"):
        program = _Program(problem, level)
        program.hold_rate(reached.rate)
        surplus = program.surplus_variables()
        if level == "imbalance":
            program.minimise(surplus)
        else:
            program.hold_imbalance(surplus, reached.imbalance)
            program.minimise(program.devices)
        choice = program.solve(solver)
        assert choice is not None, f"{solver.name}: level {level} lost the solution of the level before"
        reached = replace(levels(problem, choice), rate=reached.rate)
    return Solution(choice, levels(problem, choice), solver.name, first.num_variables)


def fewest_missing_devices(problem: FlowProblem, solver: Solver | None = None) -> dict[str, int] | None:
    """Return the fewest additional devices that would make it feasible, by type; None: more would not help."""
    solver = solver if solver is not None else Solver()
    program = _Program(problem, "missing", may_miss=True)
    program.minimise(pulp.lpSum(program.missing.values()))
    if program.solve(solver) is None:
        return None
    return {name: round(missing.value()) for name, missing in program.missing.items() if round(missing.value())}


class _Program:
    """Binary variables that choose one configuration per module; rates are relative to the consumer's largest."""

    def __init__(self, problem: FlowProblem, name: str, may_miss: bool = False) -> None:
        self._problem = problem
        self._scale = max((candidate.rate for candidate in problem.consumer), default=1.0)
        self._lp = pulp.LpProblem(name, pulp.LpMinimize)
        self._consumer = _binaries(self._lp, "c", problem.consumer)
        self._producers = [
            _binaries(self._lp, f"p{k}_", module.candidates) for k, module in enumerate(problem.producers)
        ]
        self._lp += _sum(self._consumer, _one) == 1
        for module, binaries in zip(problem.producers, self._producers, strict=True):
            chosen = _sum(binaries, _one)
            self._lp += chosen <= 1 if module.optional else chosen == 1
        for work in problem.shares:
            producers = _sum(self._pairs(work), _one)
            self._lp += producers == 1 if problem.one_producer else producers >= 1
        self.missing = {
            name: self._lp.add_variable(f"missing{k}", 0, cat="Integer")
            for k, name in enumerate(problem.devices)
            if may_miss
        }
        every = [pair for binaries in (self._consumer, *self._producers) for pair in binaries]
        self.devices = _sum(every, _devices)
        for device_type, count in problem.devices.items():
            taken = _sum([pair for pair in every if pair[1].device_type == device_type], _devices)
            self._lp += taken - self.missing.get(device_type, 0) <= count

    @property
    def num_variables(self) -> int:
        """Number of variables of the program."""
        return int(self._lp.numVariables())

    def maximise_rate(self) -> None:
        """First level: the largest rate that the consumer and every work can keep up with (Eq. 1)."""
        rate = self._lp.add_variable("rate", 0)
        self._lp += self._consumption() - rate >= 0
        for work, share in self._problem.shares.items():
            # Production above the fastest consumer's demand has no effect here, so it is capped.
            self._lp += self._production(work, cap=share) - share * rate >= 0
        self.minimise(-rate)

    def hold_rate(self, rate: float) -> None:
        """Keep the optimum of the first level; rate: samples/s."""
        for work, share in self._problem.shares.items():
            if len(self._problem.producers_of(work)) > 1:  # single producers lost their slower candidates already
                self._lp += self._production(work) >= share * (rate / self._scale - PIN_TOLERANCE)

    def surplus_variables(self) -> pulp.LpAffineExpression:
        """Distance of each work's production from demand, summed over works."""
        distances = []
        for number, (work, share) in enumerate(self._problem.shares.items()):
            distance = self._lp.add_variable(f"surplus{number}", 0)
            difference = self._production(work) - share * self._consumption()
            self._lp += distance - difference >= 0
            self._lp += distance + difference >= 0
            distances.append(distance)
        return pulp.lpSum(distances)

    def hold_imbalance(self, surplus: pulp.LpAffineExpression, imbalance: float) -> None:
        """Keep the optimum of the second level; imbalance: as in ``Levels``."""
        self._lp += surplus <= imbalance / self._scale + PIN_TOLERANCE

    def minimise(self, objective: pulp.LpAffineExpression) -> None:
        """Set the expression to minimise."""
        self._lp.setObjective(pulp.LpAffineExpression(objective))

    def solve(self, solver: Solver) -> Choice | None:
        """Return the chosen candidates; None if nothing is feasible."""
        if not self._consumer or not solver.run(self._lp):
            return None
        producers = {
            module.name: chosen
            for module, binaries in zip(self._problem.producers, self._producers, strict=True)
            if (chosen := _chosen(binaries)) is not None
        }
        consumer = _chosen(self._consumer)
        assert consumer is not None
        return Choice(producers, consumer)

    def _consumption(self) -> pulp.LpAffineExpression:
        return _sum(self._consumer, lambda candidate: candidate.rate / self._scale)

    def _production(self, work: str, cap: float = float("inf")) -> pulp.LpAffineExpression:
        return _sum(self._pairs(work), lambda candidate: min(candidate.rate / self._scale, cap))

    def _pairs(self, work: str) -> _Pairs:
        producers = zip(self._problem.producers, self._producers, strict=True)
        return [pair for module, binaries in producers if module.work == work for pair in binaries]


_Pairs = list[tuple[pulp.LpVariable, Candidate]]


def _binaries(program: pulp.LpProblem, prefix: str, candidates: Sequence[Candidate]) -> _Pairs:
    return [(program.add_variable(f"{prefix}{k}", cat="Binary"), candidate) for k, candidate in enumerate(candidates)]


def _sum(pairs: _Pairs, coefficient: Callable[[Candidate], float]) -> pulp.LpAffineExpression:
    return pulp.LpAffineExpression([(variable, coefficient(candidate)) for variable, candidate in pairs])


def _one(candidate: Candidate) -> float:
    return 1.0


def _devices(candidate: Candidate) -> float:
    return candidate.devices


def _chosen(pairs: _Pairs) -> Candidate | None:
    return next((candidate for variable, candidate in pairs if variable.value() > 0.5), None)
