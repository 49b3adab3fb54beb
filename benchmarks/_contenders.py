"""Packs every step of a workload by every method, FlowTrain's and the peers', and checks the results."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from _lengths import Workload
from _peers import Peer
from _report import Figure

from flowtrain.config.flow import SchedulerConfig
from flowtrain.scheduler.buckets import bucket_of
from flowtrain.scheduler.cost import make_cost_model
from flowtrain.scheduler.dispatch import get_dispatcher
from flowtrain.scheduler.equal_counts import with_equal_counts
from flowtrain.scheduler.layout import Layout
from flowtrain.scheduler.packing.base import Bins, Lengths, Packer, PackingRules
from flowtrain.scheduler.packing.registry import PACKERS
from flowtrain.scheduler.report import Method, MethodReport, StepFigures, figures_of

DP_SIZE = 8
DEFAULT = SchedulerConfig()
ZIGZAG = "best_fit+zigzag"
"""The paper's method: FlowTrain Algorithm 1."""


class WrongResult(Exception):
    """A method lost a sample, used one twice, or filled a bin beyond its capacity."""


@dataclass(frozen=True)
class Contender:
    """A packer, and the method that deals its bins to the ranks."""

    label: str
    pack: Packer
    dispatch: str


@dataclass(frozen=True)
class Outcome:
    """Result of a contender on a workload. num_bins: of each step, before counts were made equal."""

    contender: Contender
    report: MethodReport
    num_bins: tuple[int, ...]

    def costs(self) -> np.ndarray:
        """Cost of each step: the sum over slots of the costliest rank."""
        return np.array([step.cost for step in self.report.steps])


def rules_of(capacity: int) -> PackingRules:
    """The rules of a run with the default cost."""
    return PackingRules(capacity, make_cost_model(DEFAULT.cost, capacity), DP_SIZE)


def all_contenders(peers: Iterable[Peer]) -> list[Contender]:
    """Every packer of FlowTrain with the default dispatch, the default first; the paper's; the peers', dealt in turn.

    The peers leave dealing to a distributed sampler, which ignores costs: rank r takes every eighth bin. Here their
    slots have similar cost, so they are dealt better than by that sampler.
    """
    ours = sorted(PACKERS, key=lambda name: name != DEFAULT.packing)
    return [
        *(Contender(name, PACKERS[name], DEFAULT.dispatch) for name in ours),
        Contender(ZIGZAG, PACKERS["best_fit"], "zigzag"),
        *(Contender(peer.name, peer, "round_robin") for peer in peers),
    ]


def run(contender: Contender, workload: Workload) -> Outcome:
    """Lay out every step; raises WrongResult. First lays out the first step once, so that code is compiled."""
    rules = rules_of(workload.capacity)
    first = workload.steps[0]
    lay_out_bins(contender.pack(first, rules), first, rules, contender.dispatch)
    figures: list[StepFigures] = []
    num_bins: list[int] = []
    for lengths in workload.steps:
        started = time.perf_counter()
        bins = contender.pack(lengths, rules)
        layout = lay_out_bins(bins, lengths, rules, contender.dispatch)
        figures.append(figures_of(layout.bins, layout.slots, lengths, rules, time.perf_counter() - started))
        num_bins.append(len(bins))
        check(f"{workload.label}, {contender.label}", bins, lengths, rules)
        check(f"{workload.label}, {contender.label}", layout.bins, lengths, rules)
        if not np.array_equal(np.sort(layout.slots, axis=None), np.arange(len(layout.bins))):
            raise WrongResult(f"{workload.label}, {contender.label}: a microbatch is dealt twice or never")
    report = MethodReport.of(Method(contender.label, contender.dispatch), figures)
    return Outcome(contender, report, tuple(num_bins))


def lay_out_bins(bins: Bins, lengths: Lengths, rules: PackingRules, dispatch: str) -> Layout:
    """Do with given bins what ``lay_out`` does with a registered packer's, for packers outside its registry."""
    even = with_equal_counts(bins, lengths, rules)
    costs = even.costs(lengths, rules.cost)
    buckets = bucket_of(costs, DEFAULT.num_buckets)
    return Layout(even, buckets, get_dispatcher(dispatch)(costs, even.vision(lengths), buckets, rules.dp_size))


def check(what: str, bins: Bins, lengths: Lengths, rules: PackingRules) -> None:
    """Raise WrongResult unless every sample is in one bin and no bin holds more than its capacity."""
    if not np.array_equal(np.sort(bins.members), np.arange(len(lengths))):
        raise WrongResult(f"{what}: of {len(lengths)} samples some are in no bin or in two")
    fullest = int(bins.tokens(lengths).max(initial=0))
    if fullest > rules.capacity:
        raise WrongResult(f"{what}: a bin has {fullest} tokens, its capacity is {rules.capacity}")


def fewest_bins(lengths: Lengths, capacity: int) -> int:
    """Lower bound of the number of bins: ceil(tokens / capacity)."""
    return -(-int(lengths.tokens.sum()) // capacity)


def bins_over_bound(outcome: Outcome, workload: Workload) -> float:
    """Bins of all steps, divided by the lower bound of all steps."""
    return sum(outcome.num_bins) / sum(fewest_bins(step, workload.capacity) for step in workload.steps)


def figures(workload: Workload, outcomes: Sequence[Outcome]) -> list[Figure]:
    """Everything that the table shows, without targets."""
    found = []
    for outcome in outcomes:
        report, name = outcome.report, f"{workload.label}.{outcome.contender.label}"
        values = {
            "bins_over_bound": bins_over_bound(outcome, workload),
            "fill": report.fill,
            "step_imbalance_median": report.step_imbalance.median,
            "step_imbalance_max": report.step_imbalance.max,
            "slot_imbalance_median": report.slot_imbalance.median,
            "slot_imbalance_max": report.slot_imbalance.max,
            "step_cost_over_bound_median": report.excess.median,
            "step_cost_over_bound_max": report.excess.max,
            "dist_ratio_vision": report.dist_ratio_vision,
            "dist_ratio_tokens": report.dist_ratio_tokens,
            "pad_ratio": report.pad_ratio,
        }
        found += [Figure(f"{name}.{key}", value, "1") for key, value in values.items()]
        found.append(Figure(f"{name}.step_cost", report.step_cost, "capacities", note="mean, by Eq. 3"))
        found.append(Figure(f"{name}.layout_time_median", report.plan_time_s.median * 1e3, "ms"))
    return found
