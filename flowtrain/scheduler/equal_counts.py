"""Splits microbatches until their number is a multiple of the number of DP ranks."""

from __future__ import annotations

import numpy as np

from flowtrain.costs.flops import IntArray
from flowtrain.scheduler.compiled import compiled
from flowtrain.scheduler.packing.base import Bins, Lengths, PackingRules


def with_equal_counts(bins: Bins, lengths: Lengths, rules: PackingRules) -> Bins:
    """Return the same samples in bins whose number is the next multiple of ``rules.dp_size`` (at least one slot).

    The costliest bin with at least two samples is halved until the number fits (ties: the earlier bin), because this
    shortens the step's critical path most. If every bin has one sample, empty bins are added: fewer than ``dp_size``,
    or one slot of them if there is no sample.
    """
    num_bins = max(1, -(-len(bins) // rules.dp_size)) * rules.dp_size
    if num_bins == len(bins):
        return bins
    cost = rules.cost
    number = _split(
        lengths.tokens,
        bins.members,
        bins.offsets,
        num_bins,
        cost.per_token,
        cost.per_longest,
        cost.per_square,
    )
    return Bins.by_number(number, num_bins)


@compiled
def _split(
    tokens: IntArray,
    members: IntArray,
    offsets: IntArray,
    num_bins: int,
    per_token: float,
    per_longest: float,
    per_square: float,
) -> IntArray:
    """Split bins until there are ``num_bins``; return each sample's bin number, int64 ``[num_samples]``.

    The constant term of the cost is left out: it is the same for every bin.
    """
    members = members.copy()
    count = len(offsets) - 1
    starts, ends = np.zeros(num_bins, dtype=np.int64), np.zeros(num_bins, dtype=np.int64)
    starts[:count], ends[:count] = offsets[:-1], offsets[1:]
    costs = np.full(num_bins, -np.inf)
    for bin_number in range(count):
        inside = tokens[members[starts[bin_number] : ends[bin_number]]]
        costs[bin_number] = _cost_if_divisible(inside, per_token, per_longest, per_square)
    while count < num_bins:
        costliest = np.argmax(costs)  # the first of equals
        if costs[costliest] == -np.inf:
            break
        middle = starts[costliest] + _halve(members[starts[costliest] : ends[costliest]], tokens)
        starts[count], ends[count], ends[costliest] = middle, ends[costliest], middle
        for changed in (costliest, count):
            inside = tokens[members[starts[changed] : ends[changed]]]
            costs[changed] = _cost_if_divisible(inside, per_token, per_longest, per_square)
        count += 1
    number = np.empty(len(members), dtype=np.int64)
    for bin_number in range(count):
        number[members[starts[bin_number] : ends[bin_number]]] = bin_number
    return number


@compiled
def _cost_if_divisible(inside: IntArray, per_token: float, per_longest: float, per_square: float) -> float:
    """Return the cost of a bin from its samples' tokens, or minus infinity if it has fewer than two samples."""
    if len(inside) < 2:
        return -np.inf
    return per_token * inside.sum() + per_longest * inside.max() ** 2 + per_square * (inside**2).sum()


@compiled
def _halve(inside: IntArray, tokens: IntArray) -> int:
    """Reorder a bin's samples into two halves of similar length and return where the second half begins.

    Samples are taken longest first (ties: in the given order), and each goes to the lighter half (ties: the first).
    """
    ordered = inside[np.argsort(-tokens[inside], kind="mergesort")]
    other = np.empty_like(ordered)
    num_first, num_second, surplus = 0, 0, 0
    for index in ordered:
        if surplus <= 0:
            inside[num_first] = index
            num_first += 1
            surplus += tokens[index]
        else:
            other[num_second] = index
            num_second += 1
            surplus -= tokens[index]
    inside[num_first:] = other[:num_second]
    return num_first
