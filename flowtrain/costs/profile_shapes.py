"""The shapes that a profile measures: packed lengths with the data's mix of sequences, and batches of images."""

from __future__ import annotations

from flowtrain.costs.workload import Workload
from flowtrain.types.plan import PlannedSample

Mix = tuple[PlannedSample, ...]
"""The sequences of one packed microbatch."""

NUM_LENGTHS = 4
NUM_MIXES = 3


def packed_lengths(microbatch_tokens: int) -> tuple[int, ...]:
    """Return the packed lengths to measure, ascending; the last one is a full microbatch."""
    return tuple(sorted({max(2, microbatch_tokens * part // NUM_LENGTHS) for part in range(1, NUM_LENGTHS + 1)}))


def packed_mixes(workload: Workload) -> tuple[tuple[Mix, ...], ...]:
    """Return microbatches of each of ``packed_lengths``, ``[mix][length]``; mixes start at different samples."""
    lengths, num_samples = packed_lengths(workload.microbatch_tokens), len(workload.lengths)
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
