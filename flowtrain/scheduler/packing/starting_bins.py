"""Where the search of ``best_fit_balanced`` starts: slots for very long samples, the rest dealt greedily.

In this file, ``sizes`` are the samples' tokens in descending order, and ``number`` is each sample's bin number or -1.
"""

from __future__ import annotations

import numpy as np

from flowtrain.costs.flops import IntArray
from flowtrain.scheduler.compiled import compiled

DEALT_TOGETHER = 32
"""Neighbouring bins that ``deal`` passes over at once if none of them can be the cheapest with room."""


@compiled
def set_apart(
    sizes: IntArray,
    number: IntArray,
    num_bins: int,
    dp_size: int,
    capacity: int,
    per_token: float,
    per_longest: float,
    per_square: float,
) -> int:
    """Fill slots that one long sample makes costly; returns their number of bins. At least one slot is left over."""
    first, left = 0, len(sizes)
    while num_bins - first > dp_size:
        share, longest = _even_share(sizes, number, num_bins - first, per_token, per_longest, per_square)
        ceiling = per_token * longest + (per_longest + per_square) * longest**2
        if ceiling <= share:
            break
        left = _fill_slot(
            sizes, number, left, first, num_bins, dp_size, capacity, ceiling, per_token, per_longest, per_square
        )
        first += dp_size
    return first


@compiled
def deal(
    sizes: IntArray,
    number: IntArray,
    first: int,
    num_bins: int,
    capacity: int,
    per_token: float,
    per_longest: float,
    per_square: float,
) -> bool:
    """Give each sample, costliest first, to the cheapest bin that has room; False if a sample fits nowhere."""
    tokens = np.zeros(num_bins, dtype=np.int64)
    costs = np.full(num_bins, -np.inf)  # empty bins come first, at any cost of samples
    num_blocks = -(-(num_bins - first) // DEALT_TOGETHER)
    least_tokens, least_cost = np.zeros(num_blocks, dtype=np.int64), np.full(num_blocks, -np.inf)
    for index in range(len(sizes)):
        if number[index] >= 0:
            continue
        size, best = sizes[index], -1
        for block in range(num_blocks):
            if least_tokens[block] + size > capacity or (best >= 0 and least_cost[block] >= costs[best]):
                continue
            start = first + block * DEALT_TOGETHER
            for candidate in range(start, min(start + DEALT_TOGETHER, num_bins)):
                if tokens[candidate] + size <= capacity and (best < 0 or costs[candidate] < costs[best]):
                    best = candidate
        if best < 0:
            return False
        if tokens[best] == 0:
            costs[best] = per_longest * size**2
        number[index] = best
        tokens[best] += size
        costs[best] += per_token * size + per_square * size**2
        block = (best - first) // DEALT_TOGETHER
        start = first + block * DEALT_TOGETHER
        end = min(start + DEALT_TOGETHER, num_bins)
        least_tokens[block], least_cost[block] = tokens[start:end].min(), costs[start:end].min()
    return True


@compiled
def _even_share(
    sizes: IntArray, number: IntArray, num_bins: int, per_token: float, per_longest: float, per_square: float
) -> tuple[float, int]:
    """Return the mean cost of ``num_bins`` even bins of the remaining samples, and the longest remaining sample."""
    total, seen, longest = 0.0, 0, 0
    for index in range(len(sizes)):
        if number[index] >= 0:
            continue
        size = sizes[index]
        total += per_token * size + per_square * size**2
        if seen < num_bins:  # each even bin has one of the longest samples
            total += per_longest * size**2
        longest = max(longest, size)
        seen += 1
    return total / num_bins, longest


@compiled
def _fill_slot(
    sizes: IntArray,
    number: IntArray,
    left: int,
    first: int,
    num_bins: int,
    dp_size: int,
    capacity: int,
    ceiling: float,
    per_token: float,
    per_longest: float,
    per_square: float,
) -> int:
    """Give each of the longest samples a bin, then fill these bins, costliest first, up to the cost ``ceiling``.

    Returns the number of remaining samples.
    """
    tokens = np.zeros(dp_size, dtype=np.int64)
    costs = np.zeros(dp_size)
    seeds = 0
    for index in range(len(sizes)):
        if number[index] >= 0:
            continue
        if seeds >= dp_size and left <= num_bins - first - dp_size:
            break  # every bin of the other slots needs a sample
        size = sizes[index]
        added = per_token * size + per_square * size**2
        best = -1
        if seeds < dp_size:
            best = seeds
            added += per_longest * size**2
            seeds += 1
        else:
            for candidate in range(dp_size):
                fits = tokens[candidate] + size <= capacity and costs[candidate] + added <= ceiling
                if fits and (best < 0 or costs[candidate] > costs[best]):
                    best = candidate
        if best >= 0:
            number[index] = first + best
            tokens[best] += size
            costs[best] += added
            left -= 1
    return left
