"""From a cluster, a model and its data to an allocation: enumerate, predict, reduce, solve (FlowTrain 3.3)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from flowtrain.allocator.allocation import Allocation, Alternative, ModuleAllocation, SplitPoint, Timings
from flowtrain.allocator.candidates import Candidate, Enumeration
from flowtrain.allocator.fixed_split import solve_split
from flowtrain.allocator.infeasible import infeasible
from flowtrain.allocator.mode_reasons import rate_text
from flowtrain.allocator.program.flow import Choice, FlowProblem, Levels, adds_up, levels, production
from flowtrain.allocator.program.milp import Solution, solve
from flowtrain.allocator.program.rivals import rivals
from flowtrain.allocator.program.solvers import Solver
from flowtrain.allocator.program.splits import Split, best_splits, production_curve
from flowtrain.allocator.request import (
    Key,
    Memos,
    Rated,
    Request,
    SurrogateFactory,
    enumerate_all,
    flow_problem,
    rated_of,
)
from flowtrain.allocator.sharing import can_share, shared_choice, shared_rate
from flowtrain.allocator.surrogate import BACKBONE, Surrogate, blocked_share, starved_share
from flowtrain.config.allocator import AllocationMethod

NUM_ALTERNATIVES = 3
NUM_CHOICES = 20
WORTH_RATING = 0.6
"""Share of the best rate by means from which on a choice may be the best with uneven batches."""
_SAME = 1e-6


def allocate(
    request: Request,
    surrogate_for: SurrogateFactory,
    solver: Solver | None = None,
    method: AllocationMethod = "milp",
    memos: Memos | None = None,
) -> Allocation:
    """Return the best allocation over all of the request's choices, or that of an ablation's method.

    memos: of other enumerations of the request. If nothing fits, raises a ConfigError that names the changes that would
    help.
    """
    solver = solver if solver is not None else Solver()
    started = time.perf_counter()
    enumerations = enumerate_all(request, memos)
    enumerated = time.perf_counter()
    rated = rated_of(request, enumerations, surrogate_for)
    fronts = {key: each.front() for key, each in rated.items()}
    predicted = time.perf_counter()
    problem = flow_problem(request, fronts)
    shared = can_share(request, problem)
    solution = _shared(request, problem, fronts, surrogate_for) if shared else solve(problem, solver)
    if solution is None:
        raise infeasible(request, enumerations, problem, solver)
    startable, rate_added = replace(problem, one_producer=True), None
    if adds_up(problem, solution.choice):
        rate_added, solution = solution.levels.rate, solve(startable, solver)
        assert solution is not None, "one producer of each work is feasible if several are"
    rate_milp = None
    if method != "milp":
        rate_milp, rate_added = solution.levels.rate, None
        solution = solve_split(request, problem, fronts, method)
    shared = shared and method == "milp"
    solved = time.perf_counter()
    splits = best_splits(problem)
    search = not splits and not shared
    others = rivals(startable, solution.choice.consumer, solver, NUM_ALTERNATIVES) if search else ()
    several = len(request.cluster.device_types) > 1
    alternatives = _alternatives(solution, splits or others, several) if method == "milp" else ()
    compared = time.perf_counter()
    timings = Timings(enumerated - started, predicted - enumerated, solved - predicted, compared - solved)
    return Allocation(
        modules=_modules(request, surrogate_for(request.decided()), problem, solution),
        rate=solution.levels.rate,
        imbalance=solution.levels.imbalance,
        bottleneck=_bottleneck(problem, solution.choice),
        starved=starved_share(solution.levels.rate, solution.choice.consumer.rate),
        budget=request.cluster.counts,
        pruned={
            _label(request, key): {str(r): n for r, n in each.pruned.items()} for key, each in enumerations.items()
        },
        num_candidates={_label(request, key): len(each) for key, each in enumerations.items()},
        num_front={_label(request, key): len(each) for key, each in fronts.items()},
        num_combinations=_num_combinations(enumerations),
        num_variables=solution.num_variables,
        alternatives=alternatives,
        split_curve=tuple(_point(split) for split in splits),
        production_curve=production_curve(problem),
        solver=solution.solver,
        choices=(solution.choice,)
        if shared or method != "milp"
        else _best_choices(solution, [*(splits or others), *_varied_splits(request, problem, rated)]),
        timings=timings,
        shared=shared,
        method=method,
        rate_milp=rate_milp,
        rate_apart=levels(problem, solution.choice).rate if shared else None,
        rate_added=rate_added if rate_added is not None and rate_added > solution.levels.rate * (1.0 + _SAME) else None,
    )


def _shared(
    request: Request,
    problem: FlowProblem,
    fronts: Mapping[Key, tuple[Candidate, ...]],
    surrogate_for: SurrogateFactory,
) -> Solution:
    """All modules on the only device: there is no choice of degrees, and no excess production."""
    choice = shared_choice(request, fronts, surrogate_for)
    rate = shared_rate(choice.consumer.rate, *production(problem, choice).values())
    return Solution(choice, Levels(rate, 0.0, 1), "none", 0)


def _modules(
    request: Request, surrogate: Surrogate, problem: FlowProblem, solution: Solution
) -> tuple[ModuleAllocation, ...]:
    choice, rate = solution.choice, solution.levels.rate
    produced, consumed = production(problem, choice), choice.consumer.rate
    works = {module.name: module.work for module in problem.producers}

    def module(name: str, candidate: Candidate, share: float, keeps_up_with: float) -> ModuleAllocation:
        is_consumer = candidate.module == BACKBONE
        return ModuleAllocation(
            name=name,
            device_type=candidate.device_type,
            degrees=candidate.degrees,
            share=share,
            rate=candidate.rate,
            production=keeps_up_with,
            peak_nbytes=request.peak_nbytes(candidate),
            memory_nbytes=request.memory_nbytes(candidate.module, candidate.device_type),
            mfu=surrogate.mfu(candidate),
            waiting=starved_share(rate, consumed) if is_consumer else blocked_share(keeps_up_with, rate),
            gradient_reduction=candidate.gradient_reduction if is_consumer else None,
            num_shards=request.num_shards(candidate) if is_consumer else None,
            memory=request.backbone_memory(candidate) if is_consumer else None,
            settings=candidate.settings,
        )

    encoders = [
        module(name, candidate, problem.shares[works[name]], produced[works[name]])
        for name, candidate in choice.producers.items()
    ]
    return (*encoders, module(BACKBONE, choice.consumer, 1.0, consumed))


def _bottleneck(problem: FlowProblem, choice: Choice) -> str:
    slowest = min(
        [(choice.consumer.rate, BACKBONE)] + [(rate, work) for work, rate in production(problem, choice).items()]
    )
    return slowest[1]


def _alternatives(solution: Solution, splits: Sequence[Split], several: bool) -> tuple[Alternative, ...]:
    """The best splits with another configuration of the backbone.

    several: there are several types of devices; names then include the type.
    """
    others = [split for split in splits if split.choice.consumer != solution.choice.consumer]
    others.sort(key=lambda split: (-split.levels.rate, split.levels.imbalance, split.levels.devices))
    return tuple(
        Alternative(
            degrees={name: candidate.degrees for name, candidate in _named(split.choice, several).items()},
            devices={name: candidate.devices for name, candidate in _named(split.choice, several).items()},
            rate=split.levels.rate,
            imbalance=split.levels.imbalance,
            reason=_why_lost(solution.levels, split),
        )
        for split in others[:NUM_ALTERNATIVES]
    )


def _varied_splits(request: Request, problem: FlowProblem, rated: Mapping[Key, Rated]) -> Iterator[Split]:
    """The best split for each size of the backbone's replicas: few large ones pack more evenly than many small ones.

    Empty with several types of devices.
    """
    if len(request.cluster.device_types) > 1:
        return
    (device_type,) = request.cluster.device_types
    for size in (1 << exponent for exponent in range(device_type.count.bit_length())):
        splits = best_splits(replace(problem, consumer=rated[BACKBONE, device_type.name].front(size)))
        if splits:
            yield replace(min(splits, key=_order), is_varied=True)


def _order(split: Split) -> tuple[float, float, int]:
    return -split.levels.rate, split.levels.imbalance, split.levels.devices


def _best_choices(solution: Solution, splits: Sequence[Split]) -> tuple[Choice, ...]:
    """The optimum, and other splits that may be as good with uneven batches, which may also need more encoders."""
    worth = [split for split in splits if split.levels.rate >= WORTH_RATING * solution.levels.rate]
    found = [solution.choice]
    for split in sorted(worth, key=lambda split: (not split.is_varied, *_order(split))):
        found += [each for each in (split.choice, split.fullest) if each is not None and each not in found]
    return tuple(found[:NUM_CHOICES])


def _why_lost(best: Levels, split: Split) -> str:
    lost, consumed = split.levels, split.choice.consumer.rate
    if lost.rate < best.rate * (1.0 - _SAME):
        slower = f"{100 * (1 - lost.rate / best.rate):.1f} % slower"
        if lost.rate < consumed * (1.0 - _SAME):
            return f"{slower}: the backbone could take {rate_text(consumed)}, but what is left for encoders starves it"
        return f"{slower}: the backbone takes no more than that, and its encoders wait for it"
    if lost.imbalance > best.imbalance + _SAME * best.rate:
        return f"as fast, but flow imbalance {rate_text(lost.imbalance)} above {rate_text(best.imbalance)} samples/s"
    return f"as fast and as even, but on {lost.devices} devices where {best.devices} do"


def _named(choice: Choice, several: bool) -> Mapping[str, Candidate]:
    consumer = choice.consumer
    return {**choice.producers, f"{BACKBONE}@{consumer.device_type}" if several else BACKBONE: consumer}


def _point(split: Split) -> SplitPoint:
    devices = split.choice.consumer.devices
    return SplitPoint(
        devices, split.levels.devices - devices, split.levels.rate, split.choice.consumer.rate, split.production
    )


def _num_combinations(enumerations: Mapping[Key, Enumeration]) -> int:
    """Number of choices of one feasible configuration per module, on any type of device."""
    by_module: dict[str, int] = {}
    for (module, _), each in enumerations.items():
        by_module[module] = by_module.get(module, 0) + len(each)
    return math.prod(by_module.values())


def _label(request: Request, key: Key) -> str:
    module, device_type = key
    return f"{module}@{device_type}" if len(request.cluster.device_types) > 1 else module
