"""What a packing method does to the steps of a workload: figures of every step, and over all of them."""

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
    """A way to lay out a step; packing, dispatch: names, as in the configuration."""

    packing: str
    dispatch: str

    @property
    def label(self) -> str:
        """The name that people read."""
        return f"{self.packing} + {self.dispatch}" + (" (paper)" if self == PAPER else "")


PAPER = Method("best_fit", "zigzag")
"""What FlowTrain 3.4, Algorithm 1 does."""


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What a method made of one step.

    num_bins: microbatches over all ranks, num_slots on each. num_weightless: those without samples, which run one token
    of zero weight. fill: share of their capacity that tokens fill. dist_ratio_vision, dist_ratio_tokens: OmniBal's
    DistRatio of the encoder's work and of the backbone's tokens, mean over slots. step_imbalance, slot_imbalances:
    dearest rank over the mean, less 1. cost: sum over slots of the dearest rank, in the cost model's unit; cost_bound:
    what no dealing of as much work goes below. plan_time_s: from packing to dispatch.
    """

    num_samples: int
    num_tokens: int
    num_bins: int
    num_slots: int
    num_weightless: int
    fill: float
    dist_ratio_vision: float
    dist_ratio_tokens: float
    step_imbalance: float
    slot_imbalances: tuple[float, ...]
    cost: float
    cost_bound: float
    plan_time_s: float

    @property
    def excess(self) -> float:
        """How much dearer the step is than its lower bound, as a share of that."""
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
    """A method's figures over a workload of at least one step; the names mean what they mean in ``StepFigures``.

    num_bins, num_slots: over all steps. fill, pad_ratio: of all tokens together; padding is what is computed for no
    sample. dist_ratio_vision, dist_ratio_tokens: mean over all slots. slot_imbalance: over all slots, the other spreads
    over steps. step_cost: mean over steps.
    """

    method: Method
    steps: tuple[StepFigures, ...]
    num_bins: int
    num_slots: int
    fill: float
    pad_ratio: float
    dist_ratio_vision: float
    dist_ratio_tokens: float
    step_imbalance: Spread
    slot_imbalance: Spread
    excess: Spread
    step_cost: float
    plan_time_s: Spread

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

    steps: sizes of the samples, and what the bins must keep to. Each step is laid out twice and the second time is
    timed, so that no figure holds a compilation.
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
        cost_bound=step_cost_bound(costs, _dearest_sample(lengths, rules.cost)),
        plan_time_s=plan_time_s,
    )


def _dearest_sample(lengths: Lengths, cost: CostModel) -> float:
    if not len(lengths):
        return 0.0
    tokens = lengths.tokens
    return float(cost.of_sums(tokens, tokens, tokens**2).max())
