"""A layout, as arrays: which samples share a microbatch, which rank runs it, and which run side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from flowtrain.costs.flops import IntArray
from flowtrain.scheduler.buckets import bucket_of
from flowtrain.scheduler.dispatch import get_dispatcher
from flowtrain.scheduler.equal_counts import with_equal_counts
from flowtrain.scheduler.packing.base import Bins, Lengths, PackingRules
from flowtrain.scheduler.packing.registry import get_packer
from flowtrain.scheduler.sample_sizes import SampleSizes
from flowtrain.types.plan import Schedules


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Bins that are dealt to DP ranks."""

    bins: Bins
    buckets: IntArray
    """Class of similar cost of each bin; int64 ``[num_bins]``."""
    slots: IntArray
    """Bin numbers; int64 ``[num_slots, dp_size]``. Every bin occurs once."""


def lay_out(lengths: Lengths, rules: PackingRules, packing: str, dispatch: str, num_buckets: int) -> Layout:
    """Pack samples, equalise the ranks' counts, sort bins into buckets and deal them (FlowTrain Algorithm 1).

    packing, dispatch: names of methods; ConfigError for an unknown one. Without samples, the layout is one slot of
    empty bins.
    """
    return deal(get_packer(packing)(lengths, rules), lengths, rules, dispatch, num_buckets)


def deal(bins: Bins, lengths: Lengths, rules: PackingRules, dispatch: str, num_buckets: int) -> Layout:
    """Lay out samples that are packed; arguments as of ``lay_out``."""
    bins = with_equal_counts(bins, lengths, rules)
    costs = bins.costs(lengths, rules.cost)
    buckets = bucket_of(costs, num_buckets)
    slots = get_dispatcher(dispatch)(costs, bins.vision(lengths), buckets, rules.dp_size)
    return Layout(bins, buckets, slots)


@dataclass(frozen=True, slots=True, eq=False)
class Arrangement:
    """Bins in the order in which DP ranks run them."""

    bins: Bins
    slots: IntArray
    """Bin numbers; int64 ``[num_slots, dp_size]``. Every bin occurs once."""
    schedules: Schedules = ()
    """As of ``StepPlan``."""


class Arrange(Protocol):
    """Chooses an arrangement of a training step; a pure function."""

    def __call__(self, sizes: SampleSizes, rules: PackingRules, default: Arrangement) -> Arrangement:
        """Return the arrangement of at least one sample.

        default: by the ``scheduler`` section; it is returned where nothing is better.
        """
        ...
