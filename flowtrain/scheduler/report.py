"""How a packing method does on the steps of a workload: figures of every step, and over all steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from flowtrain.scheduler.layout import Layout, lay_out
from flowtrain.scheduler.packing.base import Lengths, PackingRules
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
    """A way to lay out a step; packing, dispatch: names as in the configuration."""

    packing: str
    dispatch: str

    @property
    def label(self) -> str:
        """The name in tables."""
        return f"{self.packing} + {self.dispatch}" + (" (paper)" if self == PAPER else "")


PAPER = Method("best_fit", "zigzag")
"""The method of FlowTrain 3.4, Algorithm 1."""


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
    """Time from packing to dispatch."""

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

    @classmethod
    def of(cls, method: Method, steps: Sequence[StepFigures]) -> MethodReport:
        """Build from the figures of every step."""
        slots = [step.num_slots for step in steps]
        bins = [step.num_bins for step in steps]
        num_tokens = sum(step.num_tokens for step in steps)
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
        )


def step_figures(
    method: Method,
    num_buckets: int,
    steps: Iterable[tuple[Lengths, PackingRules]],
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[StepFigures]:
    """Lay out each step by a method and yield its figures; an unknown method raises ConfigError at the first.

    steps: sizes of the samples and rules for the bins, per step. Each step is laid out twice and the second run is
    timed, so that no figure includes a compilation.
    """
    for lengths, rules in steps:
        lay_out(lengths, rules, method.packing, method.dispatch, num_buckets)
        started = clock()
        layout = lay_out(lengths, rules, method.packing, method.dispatch, num_buckets)
        yield figures_of(layout, lengths, rules, clock() - started)


def figures_of(layout: Layout, lengths: Lengths, rules: PackingRules, plan_time_s: float) -> StepFigures:
    """Return the figures of one layout of ``lengths``."""
    bins, slots, costs = layout.bins, layout.slots, layout.slot_costs
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
