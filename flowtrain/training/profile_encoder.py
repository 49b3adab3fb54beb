"""Measures an encoder's forward over image sizes and batch sizes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from flowtrain.models.encoder import VisionEncoder
from flowtrain.training.profile_device import clock_of

WARMUPS, REPEATS = 1, 5


def measure_encoder(
    encoder: VisionEncoder, pixels: Mapping[int, np.ndarray], batches: Sequence[int], max_batch_patches: int
) -> tuple[tuple[float, ...], ...]:
    """Return the median seconds of a forward, ``[P, B]``: a row for each size of ``pixels``, ascending.

    pixels: by number of patches, an image ``[C, H, W]``. batches: images in a batch, ascending. max_batch_patches: no
    run forwards a larger batch; times of larger ones are those of the largest allowed batch, scaled by the images.
    """
    sizes, now_s = sorted(pixels), clock_of(encoder.tower.device)
    seconds: dict[tuple[int, int], list[float]] = {}
    for number in range(WARMUPS + REPEATS):
        for size in sizes:
            for batch in _allowed(batches, size, max_batch_patches):
                started_s = now_s()
                encoder.encode([pixels[size]] * batch)
                if number >= WARMUPS:
                    seconds.setdefault((size, batch), []).append(now_s() - started_s)
    medians = {key: statistics.median(values) for key, values in seconds.items()}

    def cell(size: int, batch: int) -> float:
        largest = min(batch, _allowed(batches, size, max_batch_patches)[-1])
        return medians[size, largest] * batch / largest

    return tuple(tuple(cell(size, batch) for batch in batches) for size in sizes)


def _allowed(batches: Sequence[int], num_patches: int, max_batch_patches: int) -> list[int]:
    return [batch for batch in batches if batch * num_patches <= max_batch_patches] or [batches[0]]
