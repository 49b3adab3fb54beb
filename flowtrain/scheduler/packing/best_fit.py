"""Best-fit packing of samples as they come: the paper's method."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from heapq import heappop, heappush

from flowtrain.scheduler.packing.base import Bins
from flowtrain.scheduler.packing.segment_tree import ResidualTree


def best_fit(lengths: Sequence[int], costs: Sequence[float], capacity: int) -> Bins:
    """Put each sample, in the order given, into the open bin that it fills most tightly (FlowTrain Algorithm 1, 1-11).

    Of equally tight bins the one opened first is taken. ``costs`` are not looked at. O(n log(n * capacity)).
    """
    if not lengths:
        return ()
    shortest = min(lengths)
    assert shortest >= 1 and max(lengths) <= capacity, (shortest, max(lengths), capacity)
    tree = ResidualTree(capacity)
    bins: list[list[int]] = []
    open_bins: defaultdict[int, list[int]] = defaultdict(list)  # residual -> heap of bin numbers
    for index, length in enumerate(lengths):
        residual = tree.smallest_at_least(length)
        if residual:
            equally_tight = open_bins[residual]
            number = heappop(equally_tight)
            if not equally_tight:
                tree.discard(residual)
            bins[number].append(index)
        else:
            number, residual = len(bins), capacity
            bins.append([index])
        residual -= length
        if residual >= shortest:  # else no sample of this distribution fits any more: the bin is closed
            heappush(open_bins[residual], number)
            tree.add(residual)
    return tuple(map(tuple, bins))
