"""Iterative sampling and filtering on images and text: OmniBal's method."""

from __future__ import annotations

import numpy as np

from flowtrain.costs.flops import IntArray
from flowtrain.scheduler.compiled import compiled
from flowtrain.scheduler.packing.base import Bins, Lengths, PackingRules
from flowtrain.scheduler.packing.segment_tree import best_fit_numbers

ITERATIONS = 10
"""T of Algorithm 1; the spread settles after five (OmniBal, appendix G)."""
TEXT_SLACK = 32
"""A group is full when at most 1/32 of its text quota is left: the paper's 128 of 4096 tokens (OmniBal 5.2)."""


def isf(lengths: Lengths, rules: PackingRules) -> Bins:
    """Draw groups that fill the quota of images or of text; pack the rest by best fit (OmniBal 4.1, Algorithm 1).

    The quotas are computed from the given samples: those of a step, or of a whole data set.
    """
    number, num_groups = draw_groups(lengths, *isf_quotas(lengths, rules.capacity), rules.seed, ITERATIONS)
    left = np.flatnonzero(number < 0)
    number_left, num_bins_left = best_fit_numbers(lengths.tokens[left], np.arange(len(left)), rules.capacity)
    number[left] = num_groups + number_left
    return Bins.by_number(number, num_groups + num_bins_left)


def isf_quotas(lengths: Lengths, capacity: int) -> tuple[int, int]:
    """Return Q_v, in the unit of ``lengths.vision``, and Q_t, in tokens (OmniBal 5.2).

    Q_t is the longest sequence that a group may have: the capacity. Like the paper's 4K it counts backbone tokens,
    vision tokens included. Q_v is the average vision work of that many tokens. It is a multiple of the greatest common
    divisor of the samples' vision work (the patches of an image if all images have the same number), because a group is
    full of images only when it reaches Q_v exactly. Q_v is at least the largest sample's work, so that every sample
    fits into a group.
    """
    unit = int(np.gcd.reduce(lengths.vision)) if len(lengths) else 0
    if unit == 0:
        return 1, capacity  # no images: no group can be full of them
    num_units, num_tokens = int(lengths.vision.sum()) // unit, int(lengths.tokens.sum())
    per_group = (2 * capacity * num_units + num_tokens) // (2 * num_tokens)  # rounded to the nearest
    return max(unit * per_group, int(lengths.vision.max())), capacity


def draw_groups(lengths: Lengths, q_vision: int, q_text: int, seed: int, iterations: int) -> tuple[IntArray, int]:
    """Return each sample's group, int64 ``[num_samples]``, -1 if it is left over, and the number of groups.

    q_vision, q_text: the most vision work and the most tokens of a group. A full group has exactly ``q_vision``, or at
    least 31/32 of the text quota. A sample that exceeds a quota alone is left over.
    """
    assert q_vision >= 1 and q_text >= 1, (q_vision, q_text)
    rng = np.random.default_rng(seed)
    number = np.full(len(lengths), -1, dtype=np.int64)
    left = np.flatnonzero((lengths.tokens <= q_text) & (lengths.vision <= q_vision))
    num_groups = 0
    for _ in range(iterations):
        order = rng.permutation(left)
        num_groups = _sample_and_filter(lengths.tokens, lengths.vision, order, q_vision, q_text, number, num_groups)
        left = left[number[left] < 0]
    return number, num_groups


@compiled
def _sample_and_filter(
    tokens: IntArray,
    vision: IntArray,
    order: IntArray,
    q_vision: int,
    q_text: int,
    number: IntArray,
    num_groups: int,
) -> int:
    """Cut the samples, in the given order, into groups and number the full ones; returns the number of groups so far.

    As printed, a group is judged when the next sample exceeds a quota, so the last group is never judged.
    """
    enough_text = q_text - q_text // TEXT_SLACK
    start, sum_vision, sum_tokens = 0, 0, 0
    for place, index in enumerate(order):
        sum_vision += vision[index]
        sum_tokens += tokens[index]
        if sum_vision <= q_vision and sum_tokens <= q_text:
            continue
        if sum_vision - vision[index] >= q_vision or sum_tokens - tokens[index] >= enough_text:
            for member in order[start:place]:
                number[member] = num_groups
            num_groups += 1
        start, sum_vision, sum_tokens = place, vision[index], tokens[index]
    return num_groups
