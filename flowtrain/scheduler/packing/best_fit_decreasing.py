"""Best-fit packing, longest samples first, which needs fewer bins than packing in the given order."""

from __future__ import annotations

from flowtrain.scheduler.packing.base import Bins, Lengths, PackingRules
from flowtrain.scheduler.packing.segment_tree import best_fit_numbers
from flowtrain.scheduler.packing.sorting import descending_order


def best_fit_decreasing(lengths: Lengths, rules: PackingRules) -> Bins:
    """Put each sample, longest first (ties: in the order given), into the bin that it fills most tightly.

    The number of bins is at most 11/9 of the smallest possible number, plus a constant. O(n log capacity).
    """
    order = descending_order(lengths.tokens)
    return Bins.by_number(*best_fit_numbers(lengths.tokens, order, rules.capacity))
