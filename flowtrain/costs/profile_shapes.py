"""The shapes that a profile measures: packed lengths with the data's mix of sequences, and batches of images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from flowtrain.costs.microbatches import ALIGNED_TOKENS
from flowtrain.costs.workload import Workload
from flowtrain.types.plan import PlannedSample

Mix = tuple[PlannedSample, ...]
"""The sequences of one packed microbatch."""

_PARTS = 4
_UNEVEN = 5
"""Tokens by which ragged sequences differ from aligned ones."""
NUM_LENGTHS = 4
NUM_MIXES = 3
FEW_TARGETS = 32
"""Tokens with loss in a microbatch up to which numbers between powers of two are measured, too."""


def packed_lengths(microbatch_tokens: int, most_tokens: int = 0) -> tuple[int, ...]:
    """Return the packed lengths to measure, ascending, up to a full microbatch.

    most_tokens: of the largest microbatch that a plan may choose, to which the lengths then go on.
    """
    sizes = {microbatch_tokens, max(microbatch_tokens, most_tokens)}
    return tuple(sorted({max(2, size * part // NUM_LENGTHS) for size in sizes for part in range(1, NUM_LENGTHS + 1)}))


def packed_mixes(workload: Workload, lengths: Sequence[int] = ()) -> tuple[tuple[Mix, ...], ...]:
    """Return microbatches of each packed length, ``[mix][length]``; mixes start at different samples.

    lengths: by default those of ``packed_lengths``.
    """
    num_samples, lengths = len(workload.lengths), lengths or packed_lengths(workload.microbatch_tokens)
    return tuple(
        tuple(packed_mix(workload, num_tokens, mix * num_samples // NUM_MIXES) for num_tokens in lengths)
        for mix in range(NUM_MIXES)
    )


def packed_mix(workload: Workload, num_tokens: int, first: int) -> Mix:
    """Return consecutive samples from ``first`` on, the last one cut so that they sum to ``num_tokens``."""
    mix: list[PlannedSample] = []
    left, index = num_tokens, first
    while left:
        at = index % len(workload.lengths)
        length = int(workload.lengths[at])
        kept = min(left, length)
        # The last token of a sequence has no token to predict.
        targets = min(int(workload.target_lengths[at]) * kept // length, kept - 1)
        mix.append(PlannedSample(index, kept, int(workload.vision_lengths[at]) * kept // length, targets))
        left, index = left - kept, index + 1
    if not any(sample.num_target_tokens for sample in mix):
        longest = max(range(len(mix)), key=lambda number: mix[number].num_tokens)
        sample = mix[longest]
        mix[longest] = PlannedSample(sample.position, sample.num_tokens, sample.num_vision_tokens, 1)
    return tuple(mix)


def target_counts(most: int) -> tuple[int, ...]:
    """Return the numbers of tokens with loss to measure in a microbatch, ascending, up to ``most`` of them.

    Close to each other while they are few: kernels of a matrix with hardly any rows differ from one number to the next.
    """
    powers = [2**power for power in range(most.bit_length())]
    between = [3 * each // 2 for each in powers if 1 < each < FEW_TARGETS]
    return tuple(sorted({most, *(each for each in [*powers, *between] if each < most)}))


def with_targets(mix: Sequence[PlannedSample], count: int) -> Mix:
    """Return the same sequences with so many tokens with loss in all, in the first ones as many as they can have."""
    found = []
    for each in mix:
        own = min(count, each.num_tokens - 1)
        found.append(replace(each, num_target_tokens=own))
        count -= own
    return tuple(found)


def attention_mixes(mixes: Sequence[Sequence[PlannedSample]]) -> tuple[Mix, ...]:
    """Return two pairs of microbatches that differ in attention alone; none where the given ones are too short.

    Quarters of the longest sequence, and sequences as long as it; sequences of the mean length, by their tokens, and
    some that are slightly shorter and longer. All but the last have aligned lengths.
    """
    lengths = np.array([each.num_tokens for mix in mixes for each in mix])
    num_tokens = max(sum(each.num_tokens for each in mix) for mix in mixes)
    part, mean = (
        max(int(length) // ALIGNED_TOKENS, 1) * ALIGNED_TOKENS
        for length in (lengths.max() / _PARTS, min(np.square(lengths).sum() / lengths.sum(), num_tokens / 2))
    )
    count, pairs = num_tokens // (_PARTS * part), num_tokens // (2 * mean)
    if not count:
        return ()
    quarters, long = ([part] * _PARTS * count, 1), ([part * _PARTS] * count, _PARTS)
    even, uneven = ([mean] * 2 * pairs, 1), ([mean - _UNEVEN, mean + _UNEVEN] * pairs, 1)
    return tuple(
        tuple(PlannedSample(number, length, 0, num_targets) for number, length in enumerate(each))
        for each, num_targets in (quarters, long, even, uneven)
    )


def batch_sizes(max_batch_patches: int, fewest_patches: int) -> tuple[int, ...]:
    """Return the numbers of images to measure, ascending: powers of four, and the most in a batch."""
    most = max(1, max_batch_patches // fewest_patches)
    return tuple(sorted({most, *(4**power for power in range(most.bit_length()) if 4**power < most)}))


def image_sizes(num_patches: list[int], most: int = 4) -> tuple[int, ...]:
    """Return at most ``most`` of the given sizes, ascending, with the smallest and the largest."""
    sizes = sorted(set(num_patches))
    if len(sizes) <= most:
        return tuple(sizes)
    return tuple(sizes[number * (len(sizes) - 1) // (most - 1)] for number in range(most))
