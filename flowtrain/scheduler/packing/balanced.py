"""Greedy packing by cost: PipeTune's method."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from flowtrain.costs.flops import IntArray
from flowtrain.scheduler.compiled import compiled
from flowtrain.scheduler.packing.base import Bins, Lengths, PackingRules
from flowtrain.scheduler.packing.sorting import descending_order


def balanced(lengths: Lengths, rules: PackingRules) -> Bins:
    """Put each sample, longest first, into the fitting bin with the lowest resulting cost (PipeTune 3.1, Algorithm 1).

    As printed, Algorithm 1 opens a bin only when no other fits, so the longest samples share the first bins and the
    last bin stays light. Here all necessary bins, ``ceil(tokens / capacity)``, are open from the start. More are opened
    to reach a multiple of ``rules.dp_size``, but at most one bin per sample: otherwise the planner would halve bins
    that are already even. If no bin fits, a new one is opened. (The second choice as printed, the shortest bin that
    fits, never applies: at that point no bin fits.) Ties: the lower bin. O(n log n).
    """
    num_bins = -(-int(lengths.tokens.sum()) // rules.capacity)
    return balanced_into(lengths, rules, -(-num_bins // rules.dp_size) * rules.dp_size)


def balanced_into(lengths: Lengths, rules: PackingRules, num_bins: int) -> Bins:
    """Pack as ``balanced`` does, with ``num_bins`` bins open from the start, but at most one for each sample."""
    cost = rules.cost
    numbers = _greedy_numbers(
        lengths.tokens,
        descending_order(lengths.tokens),
        rules.capacity,
        min(num_bins, len(lengths)),
        cost.per_token,
        cost.per_longest,
        cost.per_square,
    )
    return Bins.by_number(*numbers)


@compiled
def _greedy_numbers(
    tokens: IntArray,
    order: IntArray,
    capacity: int,
    num_bins: int,
    per_token: float,
    per_longest: float,
    per_square: float,
) -> tuple[IntArray, int]:
    """Return each sample's bin and the number of bins; order: longest first.

    num_bins: open from the start.

    A bin that is not empty already holds a sample at least as long. So a sample adds the same cost to each such bin,
    and the cheapest bin with it is the cheapest bin without it; empty bins come first. The constant of the cost has no
    influence.
    """
    num_samples = len(tokens)
    number = np.empty(num_samples, dtype=np.int64)
    costs, residuals = np.empty(num_samples), np.full(num_samples, capacity)
    costs[:num_bins] = -np.inf
    candidates = [(costs[bin_number], bin_number) for bin_number in range(num_bins)]
    # Bins too full for the current sample wait here, roomiest first, until samples have become short enough.
    parked = [(0, 0) for _ in range(0)]
    for index in order:
        length = tokens[index]
        assert 1 <= length <= capacity
        while parked and -parked[0][0] >= length:
            bin_number = heappop(parked)[1]
            heappush(candidates, (costs[bin_number], bin_number))
        while candidates and residuals[candidates[0][1]] < length:
            bin_number = heappop(candidates)[1]
            heappush(parked, (-residuals[bin_number], bin_number))
        if candidates:
            bin_number = heappop(candidates)[1]
        else:
            bin_number = num_bins
            num_bins += 1
        if residuals[bin_number] == capacity:
            costs[bin_number] = per_longest * length**2
        costs[bin_number] += per_token * length + per_square * length**2
        residuals[bin_number] -= length
        number[index] = bin_number
        heappush(candidates, (costs[bin_number], bin_number))
    return number, num_bins
