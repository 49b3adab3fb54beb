"""Groups a unit's image parts into the batches that encoders lease."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import itemgetter

import numpy as np

from flowtrain.costs.flops import IntArray
from flowtrain.scheduler.compiled import compiled
from flowtrain.scheduler.sample_sizes import SampleSizes
from flowtrain.types.plan import EncodeBatch
from flowtrain.types.samples import SizedSample

_Batch = tuple[int, int, str, list[int], int, int]
"""(first place in the order of need, index of the encoder, its name, positions, patches, bytes)"""


def make_encode_batches(
    unit_index: int, samples: Iterable[SizedSample], max_batch_patches: Mapping[str, int], alignment: int
) -> tuple[EncodeBatch, ...]:
    """Return the encode batches of samples given in the order in which the backbone needs them.

    alignment: of every part in the pool, in bytes. The other arguments are as in ``cut_encode_batches``. Raises
    ConfigError for a part of an unknown encoder.
    """
    ordered = list(samples)
    positions = [sample.ref.position for sample in ordered]
    sizes = SampleSizes.in_order(ordered, positions, max_batch_patches, alignment)
    return cut_encode_batches(unit_index, sizes, np.arange(len(ordered)), max_batch_patches)


def cut_encode_batches(
    unit_index: int, sizes: SampleSizes, order: IntArray, max_batch_patches: Mapping[str, int]
) -> tuple[EncodeBatch, ...]:
    """Return the encode batches of a unit; those of each encoder are in the order in which the backbone needs them.

    order: indices of the samples, in that order.
    max_batch_patches: patch limit of a batch, by encoder. Consecutive samples share a batch up to the limit; a larger
    part gets its own batch.

    A batch depends on the plan alone, so its bits do not depend on which encoder was free. With several encoders,
    batches are sorted by when their first sample is needed.
    """
    batches: list[_Batch] = []
    for rank, (encoder, limit) in enumerate(max_batch_patches.items()):
        parts = sizes.parts[encoder]
        places = np.flatnonzero(parts.present[order])
        if not len(places):
            continue
        samples = order[places]
        positions = sizes.positions[samples].tolist()
        batches += [
            (int(places[start]), rank, encoder, positions[start:end], num_patches, nbytes)
            for start, end, num_patches, nbytes in _cut(parts.patches[samples], parts.nbytes[samples], limit).tolist()
        ]
    if len(max_batch_patches) > 1:
        batches.sort(key=itemgetter(0, 1))
    return tuple(
        [
            EncodeBatch(unit_index, index, encoder, tuple(positions), num_patches, nbytes)
            for index, (_, _, encoder, positions, num_patches, nbytes) in enumerate(batches)
        ]
    )


@compiled
def _cut(patches: IntArray, nbytes: IntArray, limit: int) -> IntArray:
    """Cut into runs of at most ``limit`` patches; a part with more patches is a run alone.

    Returns (start, end, patches, bytes) of each run; int64 ``[num_runs, 4]``.
    """
    runs = np.zeros((len(patches), 4), dtype=np.int64)
    count = 0
    for index in range(len(patches)):
        if index and runs[count, 2] + patches[index] > limit:
            count += 1
            runs[count, 0] = index
        runs[count, 1] = index + 1
        runs[count, 2] += patches[index]
        runs[count, 3] += nbytes[index]
    return runs[: count + 1]
