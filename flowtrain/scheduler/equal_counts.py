"""Makes the number of microbatches a multiple of the number of DP ranks, by splitting."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from flowtrain.scheduler.cost import CostModel
from flowtrain.scheduler.packing.base import Bins


def with_equal_counts(bins: Bins, lengths: Sequence[int], cost: CostModel, dp_size: int) -> Bins:
    """Return bins whose number is the next multiple of ``dp_size`` (at least one slot), no sample lost.

    The dearest bin with two samples or more is halved until the number fits (ties: the earlier bin), since that lowers
    the step's critical path most. Where every bin has one sample, empty bins fill up: fewer than ``dp_size``, or one
    slot of them when there is no sample at all.
    """
    num_bins = max(1, -(-len(bins) // dp_size)) * dp_size
    result = list(bins)
    dearest = [(-cost([lengths[i] for i in members]), number) for number, members in enumerate(result)]
    heapify(dearest)
    while len(result) < num_bins and dearest:
        number = heappop(dearest)[1]
        if len(result[number]) < 2:
            continue
        result[number], other = _halve(result[number], lengths)
        for changed in (number, len(result)):
            if changed == len(result):
                result.append(other)
            heappush(dearest, (-cost([lengths[i] for i in result[changed]]), changed))
    result.extend(() for _ in range(num_bins - len(result)))
    return tuple(result)


def _halve(members: Sequence[int], lengths: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Split into two non-empty halves of similar length: the longest first, always to the lighter half."""
    halves: tuple[list[int], list[int]] = ([], [])
    totals = [0, 0]
    for index in sorted(members, key=lambda i: (-lengths[i], i)):
        lighter = 0 if totals[0] <= totals[1] else 1
        halves[lighter].append(index)
        totals[lighter] += lengths[index]
    return tuple(sorted(halves[0])), tuple(sorted(halves[1]))
