"""How a packing method does on the steps of a workload: figures of every step, and over all steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Protocol

import numpy as np

from flowtrain.costs.flops import IntArray
from flowtrain.scheduler.layout import Arrange, Arrangement
from flowtrain.scheduler.packing.base import Bins, Lengths, PackingRules
from flowtrain.scheduler.sample_sizes import SampleSizes
from flowtrain.scheduler.step_planner import arranged
from flowtrain.scheduler.summary import (
    dist_ratio,
    pad_ratio,
    slot_imbalances,
    step_cost,
    step_cost_bound,
    step_imbalance,
)
from flowtrain.types.plan import CostModel


@dataclass(frozen=True, slots=True)
class Method:
    """A way to lay out a step; packing, dispatch: names as in the configuration.

    is_searched: by a search, with what those methods give as the default.
    """

    packing: str
    dispatch: str
    is_searched: bool = False

    @property
    def label(self) -> str:
        """The name in tables."""
        if self.is_searched:
            return SEARCHED
        return f"{self.packing} + {self.dispatch}" + (" (paper)" if self == PAPER else "")


PAPER = Method("best_fit", "zigzag")
"""The method of FlowTrain 3.4, Algorithm 1."""
SEARCHED = "pipetune (searched)"
"""Name of a searched method; ``pipeline.policy: pipetune`` is the only one."""


class StepSearch(Arrange, Protocol):
    """Searches the arrangement of a step, and times any arrangement."""

    def seconds(self, sizes: SampleSizes, arrangement: Arrangement) -> float:
        """Return the simulated seconds of the step, without the update."""
        ...


@dataclass(frozen=True, slots=True)
class WorkloadStep:
    """Sizes of one step's samples, and the rules for its bins."""

    lengths: Lengths
    rules: PackingRules
    num_positions: int
    """Its samples, rejected ones too."""
    sizes: SampleSizes | None = None
    """All sizes of these samples; a search needs them."""


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The figures of one step laid out by one method."""

    num_samples: int
    num_tokens: int
    num_bins: int
    """Microbatches over all ranks."""
    num_slots: int
    """Microbatches on each rank."""
    num_weightless: int
    """Microbatches without samples, which run one token of zero weight."""
    fill: float
    """Share of the microbatches' capacity that tokens fill."""
    dist_ratio_vision: float
    """OmniBal's DistRatio of the encoder's work, mean over slots."""
    dist_ratio_tokens: float
    """OmniBal's DistRatio of the backbone's tokens, mean over slots."""
    step_imbalance: float
    """Costliest rank over the mean, minus 1, of the step."""
    slot_imbalances: tuple[float, ...]
    """Costliest rank over the mean, minus 1, of each slot."""
    cost: float
    """Sum over slots of the costliest rank, in the cost model's unit."""
    cost_bound: float
    """Lower bound of ``cost`` for this much work, in the same unit."""
    plan_time_s: float
    """Time from packing to dispatch, and of the search."""
    simulated_s: float | None = None
    """Simulated seconds without the update; None where the devices' times are not known, or there is no sample."""

    @property
    def excess(self) -> float:
        """How far the step's cost is above its lower bound, as a share of the bound."""
        return self.cost / self.cost_bound - 1.0 if self.cost_bound > 0.0 else 0.0


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and maximum."""

    median: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Build from at least one value."""
        kept = list(values)
        return cls(median(kept), max(kept))


@dataclass(frozen=True, slots=True)
class MethodReport:
    """A method's figures over a workload of at least one step; names have the same meaning as in ``StepFigures``."""

    method: Method
    steps: tuple[StepFigures, ...]
    num_bins: int
    """Sum over steps."""
    num_slots: int
    """Sum over steps."""
    fill: float
    """Of all tokens together."""
    pad_ratio: float
    """Share of all computed tokens that belong to no sample."""
    dist_ratio_vision: float
    """Mean over all slots."""
    dist_ratio_tokens: float
    """Mean over all slots."""
    step_imbalance: Spread
    """Over steps."""
    slot_imbalance: Spread
    """Over all slots."""
    excess: Spread
    """Over steps."""
    step_cost: float
    """Mean over steps."""
    plan_time_s: Spread
    """Over steps."""
    simulated_s: float | None = None
    """Mean over steps with samples; None where the devices' times are not known, or no step has one."""

    @classmethod
    def of(cls, method: Method, steps: Sequence[StepFigures]) -> MethodReport:
        """Build from the figures of every step."""
        slots = [step.num_slots for step in steps]
        bins = [step.num_bins for step in steps]
        num_tokens = sum(step.num_tokens for step in steps)
        simulated = [step.simulated_s for step in steps if step.simulated_s is not None]
        return cls(
            method=method,
            steps=tuple(steps),
            num_bins=sum(bins),
            num_slots=sum(slots),
            fill=fmean((step.fill for step in steps), bins),
            pad_ratio=pad_ratio(num_tokens, num_tokens + sum(step.num_weightless for step in steps)),
            dist_ratio_vision=fmean((step.dist_ratio_vision for step in steps), slots),
            dist_ratio_tokens=fmean((step.dist_ratio_tokens for step in steps), slots),
            step_imbalance=Spread.of(step.step_imbalance for step in steps),
            slot_imbalance=Spread.of(value for step in steps for value in step.slot_imbalances),
            excess=Spread.of(step.excess for step in steps),
            step_cost=fmean(step.cost for step in steps),
            plan_time_s=Spread.of(step.plan_time_s for step in steps),
            simulated_s=fmean(simulated) if simulated else None,
        )


def step_figures(
    method: Method,
    num_buckets: int,
    steps: Iterable[WorkloadStep],
    clock: Callable[[], float] = time.perf_counter,
    search: StepSearch | None = None,
) -> Iterator[StepFigures]:
    """Lay out each step by a method and yield its figures; an unknown method raises ConfigError at the first.

    search: of a searched method; where it is given, steps with all sizes are simulated.

    Each step is laid out twice and the second run is timed, so that no figure includes a compilation. A search takes
    long, and only the first one is run twice.
    """
    has_searched = False
    for step in steps:
        if not (method.is_searched and has_searched):
            _arranged(method, num_buckets, step, search)
        has_searched |= len(step.lengths) > 0
        started = clock()
        chosen = _arranged(method, num_buckets, step, search)
        figures = figures_of(chosen.bins, chosen.slots, step.lengths, step.rules, clock() - started)
        if search is not None and step.sizes is not None and len(step.lengths):
            figures = replace(figures, simulated_s=search.seconds(step.sizes, chosen))
        yield figures


def _arranged(method: Method, num_buckets: int, step: WorkloadStep, search: StepSearch | None) -> Arrangement:
    default = arranged(step.lengths, step.rules, method.packing, method.dispatch, num_buckets)
    if not method.is_searched or not len(step.lengths):
        return default
    assert search is not None and step.sizes is not None, "a search needs all sizes"
    return search(step.sizes, step.rules, default)


def figures_of(bins: Bins, slots: IntArray, lengths: Lengths, rules: PackingRules, plan_time_s: float) -> StepFigures:
    """Return the figures of one layout of ``lengths``; slots: as of ``Layout``."""
    costs = bins.costs(lengths, rules.cost)[slots]
    num_tokens, num_bins = int(lengths.tokens.sum()), len(bins)
    return StepFigures(
        num_samples=len(lengths),
        num_tokens=num_tokens,
        num_bins=num_bins,
        num_slots=len(slots),
        num_weightless=int((np.diff(bins.offsets) == 0).sum()),
        fill=num_tokens / (num_bins * rules.capacity),
        dist_ratio_vision=dist_ratio(bins.vision(lengths)[slots]),
        dist_ratio_tokens=dist_ratio(bins.tokens(lengths)[slots]),
        step_imbalance=step_imbalance(costs),
        slot_imbalances=tuple(slot_imbalances(costs).tolist()),
        cost=step_cost(costs),
        cost_bound=step_cost_bound(costs, _costliest_sample(lengths, rules.cost)),
        plan_time_s=plan_time_s,
    )


def _costliest_sample(lengths: Lengths, cost: CostModel) -> float:
    if not len(lengths):
        return 0.0
    tokens = lengths.tokens
    return float(cost.of_sums(tokens, tokens, tokens**2).max())
