"""A layout: which samples share a microbatch, and which microbatch runs where and beside which. Numbers alone."""

from __future__ import annotations

from dataclasses import dataclass

from flowtrain.costs.flops import FloatArray, IntArray
from flowtrain.scheduler.buckets import bucket_of
from flowtrain.scheduler.dispatch import get_dispatcher
from flowtrain.scheduler.equal_counts import with_equal_counts
from flowtrain.scheduler.packing.base import Bins, Lengths, PackingRules
from flowtrain.scheduler.packing.registry import get_packer


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Bins, dealt.

    costs: float64 ``[num_bins]``. buckets: int64 ``[num_bins]``, classes of similar cost. slots: int64 ``[num_slots,
    dp_size]``, numbers of bins; every bin occurs once.
    """

    bins: Bins
    costs: FloatArray
    buckets: IntArray
    slots: IntArray

    @property
    def slot_costs(self) -> FloatArray:
        """Cost of what each rank runs in each slot; float64 ``[num_slots, dp_size]``."""
        return self.costs[self.slots]


def lay_out(lengths: Lengths, rules: PackingRules, packing: str, dispatch: str, num_buckets: int) -> Layout:
    """Pack, make the counts equal, cut into buckets and deal (FlowTrain Algorithm 1).

    packing, dispatch: names of methods; ConfigError for an unknown one. Without samples there is one slot of
    empty bins.
    """
    bins = with_equal_counts(get_packer(packing)(lengths, rules), lengths, rules)
    costs = bins.costs(lengths, rules.cost)
    buckets = bucket_of(costs, num_buckets)
    slots = get_dispatcher(dispatch)(costs, bins.vision(lengths), buckets, rules.dp_size)
    return Layout(bins, costs, buckets, slots)
