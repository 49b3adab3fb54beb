"""The program's optimum is brute force's, in all three levels, with every solver that is installed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.allocator.candidates import Candidate
from flowtrain.allocator.pareto import pareto_front
from flowtrain.allocator.program.flow import Choice, FlowProblem, Levels, Module, levels, production
from flowtrain.allocator.program.milp import fewest_missing_devices, solve
from flowtrain.allocator.program.reduction import fast_enough, reduce
from flowtrain.allocator.program.rivals import rivals
from flowtrain.allocator.program.solvers import Solver, installed_solvers
from flowtrain.allocator.program.splits import best_splits
from flowtrain.errors import ConfigError
from flowtrain.types.plan import Degrees

MAX_DEVICES = 64
ABSOLUTE = 1e-6
TYPES = ("fast", "slow")


def devices_by_type(choice: Choice) -> dict[str, int]:
    """Number of devices of each type in a choice."""
    taken: dict[str, int] = {}
    for candidate in (choice.consumer, *choice.producers.values()):
        taken[candidate.device_type] = taken.get(candidate.device_type, 0) + candidate.devices
    return taken


def front_of(module: str, device_type: str, points: list[tuple[int, int]]) -> tuple[Candidate, ...]:
    devices, rates = np.array([d for d, _ in points]), np.array([float(r) for _, r in points])
    return tuple(
        Candidate(module, device_type, Degrees(dp=int(devices[i])), float(rates[i]))
        for i in pareto_front(devices, rates, devices)
    )


@st.composite
def fronts(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Rising devices with rising rates: no candidate is dominated, and ties between sums are frequent."""
    size = draw(st.integers(1, 6))
    devices = draw(st.sets(st.integers(1, MAX_DEVICES // 2), min_size=size, max_size=size))
    rates = draw(st.sets(st.integers(1, draw(st.sampled_from([12, 1000]))), min_size=size, max_size=size))
    return list(zip(sorted(devices), sorted(rates), strict=True))


points = fronts()
# Eighths and whole rates: every sum below is exact, so that ties are ties.
shares = st.sampled_from([0.125, 0.25, 0.5, 0.75, 1.0])


@st.composite
def problems(draw: st.DrawFn) -> FlowProblem:
    """Up to three encoders over one or two types of devices; works may be shared, and then are optional or not."""
    types = TYPES[: draw(st.integers(1, 2))]
    producers = []
    for number in range(draw(st.integers(1, 3))):
        name = f"encoder{number}"
        work = draw(st.sampled_from(["encoder0", name]))
        device_type = draw(st.sampled_from(types))
        optional = (work != name or len(types) > 1) and draw(st.booleans())
        producers.append(Module(name, work, front_of(name, device_type, draw(points)), optional))
    required = Counter(module.work for module in producers if not module.optional)
    consumer = sum((front_of("backbone", each, draw(points)) for each in types), ())
    return FlowProblem(
        tuple(producers),
        consumer,
        {work: draw(shares) for work in sorted({module.work for module in producers})},
        {each: draw(st.sampled_from([6, 24, 48, MAX_DEVICES])) for each in types},
        one_producer=max(required.values(), default=0) <= 1 and draw(st.booleans()),
    )


def every_choice(problem: FlowProblem) -> Iterator[Choice]:
    options = [(*module.candidates, *([None] if module.optional else [])) for module in problem.producers]
    for consumer, *made in product(problem.consumer, *options):
        names = [module.name for module in problem.producers]
        choice = Choice({name: each for name, each in zip(names, made, strict=True) if each is not None}, consumer)
        makers = Counter(module.work for module in problem.producers if module.name in choice.producers)
        fits = all(taken <= problem.devices[each] for each, taken in devices_by_type(choice).items())
        is_made = set(makers) == set(problem.shares) and not (problem.one_producer and max(makers.values()) > 1)
        if fits and is_made:
            yield choice


def brute_force(problem: FlowProblem) -> Levels | None:
    def key(worth: Levels) -> tuple[float, float, int]:
        return (-worth.rate, worth.imbalance, worth.devices)

    return min((levels(problem, choice) for choice in every_choice(problem)), key=key, default=None)


def as_tuple(worth: Levels) -> tuple[float, float, int]:
    return worth.rate, worth.imbalance, worth.devices


@pytest.mark.parametrize("solver", installed_solvers())
@given(problem=problems())
def test_the_optimum_is_brute_forces_in_all_three_levels(solver: str, problem: FlowProblem) -> None:
    best, solution = brute_force(problem), solve(problem, Solver(solver))
    if best is None:
        assert solution is None
        return
    assert solution is not None and solution.solver == solver
    assert as_tuple(solution.levels) == pytest.approx(as_tuple(best), rel=1e-9, abs=ABSOLUTE)
    # The reported values are those of the chosen candidates, and the candidates fit.
    assert levels(problem, solution.choice) == solution.levels
    assert all(taken <= problem.devices[each] for each, taken in devices_by_type(solution.choice).items())


@given(problem=problems())
def test_reduction_loses_no_optimum(problem: FlowProblem) -> None:
    best = brute_force(problem)
    reduced = reduce(problem)
    if best is None:
        assert brute_force(reduced) is None
        return
    found = brute_force(fast_enough(reduced, best.rate))
    assert found is not None and as_tuple(found) == as_tuple(best)


@given(problem=problems())
def test_rivals_are_the_best_of_other_consumers(problem: FlowProblem) -> None:
    solution = solve(problem)
    if solution is None:
        return
    best: dict[Candidate, float] = {}
    for choice in every_choice(problem):
        best[choice.consumer] = max(best.get(choice.consumer, 0.0), levels(problem, choice).rate)
    del best[solution.choice.consumer]
    found = rivals(problem, solution.choice.consumer, Solver(), 3)
    assert [split.levels.rate for split in found] == pytest.approx(sorted(best.values(), reverse=True)[:3])
    assert all(split.choice.consumer in best and split.production >= split.levels.rate for split in found)


@given(problem=problems())
def test_the_best_split_has_the_optimal_rate(problem: FlowProblem) -> None:
    best, splits = brute_force(problem), best_splits(problem)
    if len(problem.devices) > 1 or len(problem.shares) < len(problem.producers):
        assert splits == ()
        return
    assert (best is None) == (not splits)
    for split in splits:
        assert sum(devices_by_type(split.choice).values()) <= sum(problem.devices.values())
        of_same = [c for c in every_choice(problem) if c.consumer == split.choice.consumer]
        assert split.levels.rate == max(levels(problem, choice).rate for choice in of_same)
    if best is not None:
        assert max(split.levels.rate for split in splits) == best.rate


@pytest.mark.parametrize("solver", installed_solvers())
@given(problem=problems())
def test_missing_devices_are_the_fewest(solver: str, problem: FlowProblem) -> None:
    missing = fewest_missing_devices(problem, Solver(solver))
    roomy = FlowProblem(problem.producers, problem.consumer, problem.shares, dict.fromkeys(problem.devices, 10**6))
    lacks = [
        sum(max(0, taken - problem.devices[each]) for each, taken in devices_by_type(choice).items())
        for choice in every_choice(roomy)
    ]
    assert missing is not None and sum(missing.values()) == min(lacks)


def test_reduction_keeps_the_slowest_that_covers_the_fastest_consumer() -> None:
    vision = front_of("vision", "fast", [(n, 19 * n) for n in range(1, 12)])
    problem = FlowProblem(
        (Module("vision", "vision", vision),),
        front_of("backbone", "fast", [(8, 50), (16, 100)]),
        {"vision": 1.0},
        {"fast": 64},
    )
    assert [each.devices for each in reduce(problem).producers[0].candidates] == [1, 2, 3, 4, 5, 6]


def test_without_pareto_front_slower_would_win() -> None:
    """Why fronts: on equal devices Eq. 2's second objective prefers the slower encoder."""
    consumer = (Candidate("backbone", "fast", Degrees(dp=4), 10.0),)
    fast, slow = (Candidate("vision", "fast", Degrees(dp=2), rate) for rate in (15.0, 11.0))

    def chosen(candidates: tuple[Candidate, ...]) -> Candidate:
        problem = FlowProblem((Module("vision", "vision", candidates),), consumer, {"vision": 1.0}, {"fast": 8})
        solution = solve(problem)
        assert solution is not None
        return solution.choice.producers["vision"]

    assert chosen((fast, slow)) == slow
    kept = pareto_front(np.array([2, 2]), np.array([15.0, 11.0]))
    assert chosen(tuple((fast, slow)[i] for i in kept)) == fast


def test_modalities_are_matched_by_their_share() -> None:
    """A tenth of the samples has sound: one device that handles 2 of them per second is enough for 20 samples/s."""
    problem = FlowProblem(
        (
            Module("vision", "vision", front_of("vision", "fast", [(n, 5 * n) for n in range(1, 9)])),
            Module("sound", "sound", front_of("sound", "fast", [(n, 2 * n) for n in range(1, 9)])),
        ),
        front_of("backbone", "fast", [(8, 10), (16, 20)]),
        {"vision": 1.0, "sound": 0.125},
        {"fast": 64},
    )
    solution = solve(problem)
    assert solution is not None
    assert {name: each.devices for name, each in solution.choice.producers.items()} == {"vision": 4, "sound": 2}
    assert production(problem, solution.choice) == {"vision": 20.0, "sound": 32.0}
    # 4 are produced, 2.5 are needed.
    assert solution.levels == Levels(20.0, 1.5, 22)


def test_a_solver_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowtrain.allocator.program.solvers.installed_solvers", lambda: ("cbc",))
    assert Solver().name == "cbc"
    with pytest.raises(ConfigError, match=r"--solver \(highs\) is not installed; installed: cbc"):
        Solver("highs")


@pytest.mark.skipif("gurobi" not in installed_solvers(), reason="gurobipy is not installed")
def test_gurobi_beyond_its_licence_is_a_clear_error_or_the_next_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    import gurobipy

    def refuse(*arguments: object) -> None:
        raise gurobipy.GurobiError(10010, "Model too large for size-limited license")

    monkeypatch.setattr(Solver, "_run", lambda self, lp: refuse() if self.name == "gurobi" else original(self, lp))
    problem = FlowProblem(
        (Module("vision", "vision", front_of("vision", "fast", [(1, 5)])),),
        front_of("backbone", "fast", [(2, 4)]),
        {"vision": 1.0},
        {"fast": 4},
    )
    with pytest.raises(ConfigError, match=r"its licence does not cover \d+ variables; take highs"):
        solve(problem, Solver("gurobi"))
    monkeypatch.setattr("flowtrain.allocator.program.solvers.installed_solvers", lambda: ("gurobi", "cbc"))
    solution = solve(problem, Solver())
    assert solution is not None and solution.solver == "cbc" and solution.levels == Levels(4.0, 1.0, 3)


original = Solver._run
