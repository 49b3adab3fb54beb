"""Local search that evens out the costs of bins: it moves one sample or swaps two."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flowtrain.costs.flops import FloatArray, IntArray
from flowtrain.scheduler.compiled import compiled

TOLERANCE = 5e-4
"""A bin whose cost deviates from the mean by at most this share of the mean counts as even."""
ENOUGH = 0.6
"""An exchange that removes at least this share of the worst squared deviation is made without looking further."""
MOST_PARTNERS = 256
"""Bins that a round tries to exchange with, the next ones by number; to try all gave hardly more even bins."""
BLOCK = 32
"""Neighbouring bins of which only the outer two are compared with others."""
MAX_ROUNDS_PER_BIN = 8
"""Bound on the search, in rounds per bin. It ends much earlier, unless many bins are stuck close to even."""


@compiled
def even_out(
    sizes: IntArray,
    number: IntArray,
    first: int,
    num_bins: int,
    capacity: int,
    per_token: float,
    per_longest: float,
    per_square: float,
) -> None:
    """Move and swap samples between the bins from ``first`` on, until no exchange tried makes uneven bins more even.

    sizes: tokens, descending. number: the bin of each sample, changed in place. No bin exceeds the capacity.
    """
    values = per_token * sizes + per_square * sizes**2
    members, counts, tokens, linear = _gather(sizes, values, number, first, num_bins - first, capacity)
    costs = np.empty(len(counts))
    for bin_ in range(len(counts)):
        longest = sizes[members[bin_, 0]] if counts[bin_] else 0
        costs[bin_] = linear[bin_] + per_longest * longest**2
    stuck = np.zeros(len(counts), dtype=np.bool_)
    total, outer = costs.sum(), np.full((-(-len(counts) // BLOCK), 2), -1)
    for bin_ in range(0, len(counts), BLOCK):
        _find_outer(costs, stuck, outer, bin_)
    for _ in range(MAX_ROUNDS_PER_BIN * len(counts)):
        mean = total / len(counts)
        far = _furthest(costs, outer, mean)
        if far < 0:
            break
        best_gain, best_partner, best_give, best_take = 1e-9 * mean**2, -1, -1, -1
        num_tried = 0
        for distance in range(1, len(counts)):
            partner = (far + distance) % len(counts)
            if (costs[partner] - mean) * (costs[far] - mean) > 0.0:
                continue
            if num_tried == MOST_PARTNERS:
                break
            num_tried += 1
            costly, cheap = (far, partner) if costs[far] > costs[partner] else (partner, far)
            gain, give, take = _best_exchange(
                sizes, values, members, counts, tokens, linear, costs, costly, cheap, mean, capacity, per_longest
            )
            if gain > best_gain:
                best_gain, best_partner, best_give, best_take = gain, partner, give, take
                if gain > ENOUGH * (costs[far] - mean) ** 2:
                    break
        if best_partner < 0:
            stuck[far] = True
            _find_outer(costs, stuck, outer, far)
            continue
        total -= costs[far] + costs[best_partner]
        costly, cheap = (far, best_partner) if costs[far] > costs[best_partner] else (best_partner, far)
        given = members[costly, best_give]
        taken = members[cheap, best_take] if best_take < counts[cheap] else -1
        _replace(sizes, values, members, counts, tokens, linear, costs, costly, given, taken, per_longest)
        _replace(sizes, values, members, counts, tokens, linear, costs, cheap, taken, given, per_longest)
        total += costs[far] + costs[best_partner]
        stuck[far] = stuck[best_partner] = False
        _find_outer(costs, stuck, outer, far)
        _find_outer(costs, stuck, outer, best_partner)
    for bin_ in range(len(counts)):
        number[members[bin_, : counts[bin_]]] = first + bin_


@compiled
def _gather(
    sizes: IntArray, values: FloatArray, number: IntArray, first: int, num_bins: int, capacity: int
) -> tuple[IntArray, IntArray, IntArray, FloatArray]:
    """Return the members (ascending, so sizes descend), number of members, tokens and linear cost of each bin."""
    width = min(len(sizes), capacity // sizes[-1]) + 1
    members = np.empty((num_bins, width), dtype=np.int64)
    counts = np.zeros(num_bins, dtype=np.int64)
    tokens = np.zeros(num_bins, dtype=np.int64)
    linear = np.zeros(num_bins)
    for index in range(len(sizes)):
        bin_ = number[index] - first
        if bin_ >= 0:
            members[bin_, counts[bin_]] = index
            counts[bin_] += 1
            tokens[bin_] += sizes[index]
            linear[bin_] += values[index]
    return members, counts, tokens, linear


@compiled
def _find_outer(costs: FloatArray, stuck: npt.NDArray[np.bool_], outer: IntArray, bin_: int) -> None:
    """Note the costliest and the cheapest bin that are not stuck, -1 if all are, of the block that a bin is in."""
    block = bin_ // BLOCK
    costliest = cheapest = -1
    for other in range(block * BLOCK, min((block + 1) * BLOCK, len(costs))):
        if stuck[other]:
            continue
        if costliest < 0 or costs[other] > costs[costliest]:
            costliest = other
        if cheapest < 0 or costs[other] < costs[cheapest]:
            cheapest = other
    outer[block, 0], outer[block, 1] = costliest, cheapest


@compiled
def _furthest(costs: FloatArray, outer: IntArray, mean: float) -> int:
    """Return the bin that deviates most from the mean, the first of equals, or -1 if all are even or stuck."""
    far, deviation = -1, TOLERANCE * mean
    for bin_ in outer.ravel():
        if bin_ < 0:
            continue
        its = abs(costs[bin_] - mean)
        if its > deviation or (its == deviation and bin_ < far):
            far, deviation = int(bin_), its
    return far


@compiled
def _best_exchange(
    sizes: IntArray,
    values: FloatArray,
    members: IntArray,
    counts: IntArray,
    tokens: IntArray,
    linear: FloatArray,
    costs: FloatArray,
    costly: int,
    cheap: int,
    mean: float,
    capacity: int,
    per_longest: float,
) -> tuple[float, int, int]:
    """Return the best move or swap from a costly bin to a cheap one: (gain, place in costly, place in cheap).

    The gain is the decrease of the squared deviations from the mean. A place in cheap after its last member means a
    move.
    """
    half = 0.5 * (costs[costly] - costs[cheap])
    before = (costs[costly] - mean) ** 2 + (costs[cheap] - mean) ** 2
    num_costly, num_cheap = counts[costly], counts[cheap]
    best, best_give, best_take, start = -1.0, -1, -1, 0
    for give in range(num_costly):
        x = members[costly, give]
        longest = 0
        if num_costly > 1:
            longest = sizes[members[costly, 1 if give == 0 else 0]]
        # The ideal partner is smaller by half the difference. It gets smaller with x, so `start` only grows.
        while start < num_cheap and values[members[cheap, start]] > values[x] - half:
            start += 1
        for take in range(min(start, num_cheap), max(start - 2, -1), -1):
            y = members[cheap, take] if take < num_cheap else -1
            y_size, y_value = (sizes[y], values[y]) if y >= 0 else (0, 0.0)
            moved = sizes[x] - y_size
            if tokens[cheap] + moved > capacity or tokens[costly] - moved > capacity or (y < 0 and num_costly == 1):
                continue
            costly_longest = max(longest, y_size)
            cheap_longest = sizes[x]
            if num_cheap > (1 if take == 0 else 0):
                cheap_longest = max(cheap_longest, sizes[members[cheap, 1 if take == 0 else 0]])
            new_costly = linear[costly] - values[x] + y_value + per_longest * costly_longest**2
            new_cheap = linear[cheap] + values[x] - y_value + per_longest * cheap_longest**2
            gain = before - (new_costly - mean) ** 2 - (new_cheap - mean) ** 2
            if gain > best:
                best, best_give, best_take = gain, give, take
    return best, best_give, best_take


@compiled
def _replace(
    sizes: IntArray,
    values: FloatArray,
    members: IntArray,
    counts: IntArray,
    tokens: IntArray,
    linear: FloatArray,
    costs: FloatArray,
    bin_: int,
    out: int,
    into: int,
    per_longest: float,
) -> None:
    """Remove sample ``out`` from a bin and insert ``into`` (-1: none); members stay ascending."""
    row = members[bin_]
    count = counts[bin_]
    if out >= 0:
        place = 0
        while row[place] != out:
            place += 1
        for after in range(place, count - 1):
            row[after] = row[after + 1]
        count -= 1
        tokens[bin_] -= sizes[out]
        linear[bin_] -= values[out]
    if into >= 0:
        place = count
        while place > 0 and row[place - 1] > into:
            row[place] = row[place - 1]
            place -= 1
        row[place] = into
        count += 1
        tokens[bin_] += sizes[into]
        linear[bin_] += values[into]
    counts[bin_] = count
    longest = sizes[row[0]] if count else 0
    costs[bin_] = linear[bin_] + per_longest * longest**2
