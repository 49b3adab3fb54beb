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
    """Draw groups that fill the quota of images or of text; best fit for what is left (OmniBal 4.1, Algorithm 1).

    The quotas follow from the samples given: of a step, or of a whole data set.
    """
    number, num_groups = draw_groups(lengths, *isf_quotas(lengths, rules.capacity), rules.seed, ITERATIONS)
    left = np.flatnonzero(number < 0)
    number_left, num_bins_left = best_fit_numbers(lengths.tokens[left], np.arange(len(left)), rules.capacity)
    number[left] = num_groups + number_left
    return Bins.by_number(number, num_groups + num_bins_left)


def isf_quotas(lengths: Lengths, capacity: int) -> tuple[int, int]:
    """Return Q_v, in the unit of ``lengths.vision``, and Q_t, in tokens (OmniBal 5.2).

    Q_t is the longest sequence that a group may be: the capacity. Like the paper's 4K it counts what the backbone sees,
    vision tokens included. Q_v is the vision work that so many tokens bring on average, a multiple of the smallest step
    between samples (an image's patches, where all images have as many), since a group is full of images only when it
    meets Q_v exactly; it is never less than the largest sample's, so that every sample fits a group.
    """
    unit = int(np.gcd.reduce(lengths.vision)) if len(lengths) else 0
    if unit == 0:
        return 1, capacity  # no images: no group can be full of them
    num_units, num_tokens = int(lengths.vision.sum()) // unit, int(lengths.tokens.sum())
    per_group = (2 * capacity * num_units + num_tokens) // (2 * num_tokens)  # rounded to the nearest
    return max(unit * per_group, int(lengths.vision.max())), capacity


def draw_groups(lengths: Lengths, q_vision: int, q_text: int, seed: int, iterations: int) -> tuple[IntArray, int]:
    """Return each sample's group, int64 ``[num_samples]``, -1 where it is left over, and the number of groups.

    q_vision, q_text: the vision work and the tokens that a group has at most. A full group has exactly ``q_vision``, or
    all of the text quota but 1/32. A sample that is beyond a quota alone is left over.
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
    """Cut the samples, in the order given, into groups and number those that are full; returns groups so far.

    As printed, a group is judged when the next sample goes beyond a quota, so the last one is not.
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
