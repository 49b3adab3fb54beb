"""Measures an encoder's forward over image sizes and batch sizes, and a trained layer in each memory strategy."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch

from flowtrain.models.encoder import VisionEncoder
from flowtrain.models.encoder_stage import EncoderStage
from flowtrain.pipeline.actions import MemoryKind, MemoryStrategy
from flowtrain.training.profile_device import clock_of
from flowtrain.training.profile_memory import kept_nbytes
from flowtrain.types.profile import LayerTimes

WARMUPS, REPEATS = 1, 5
_DEPTHS = (3, 1)
_LEAST_S = 1e-9


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


def measure_encoder_layers(
    stage: EncoderStage, images: Sequence[np.ndarray], kinds: Mapping[str, MemoryKind], device: torch.device
) -> dict[str, LayerTimes]:
    """Return the times of one layer, trained, by memory strategy; none for a tower of a single layer.

    stage: the whole tower; all its parameters are trained from now on. images: of one batch, ``[C, H, W]``.
    """
    depths = (min(_DEPTHS[0], len(stage.layers)), _DEPTHS[1])
    if depths[0] == depths[1]:
        return {}
    stage.is_trained = True
    stage.requires_grad_()
    towers = [stage.take(range(depth), is_first=True, is_last=False).train() for depth in depths]
    dtype = next(stage.parameters()).dtype
    inputs = [torch.from_numpy(image).to(device, dtype) for image in images]
    sizes = [(image.shape[1], image.shape[2]) for image in images]
    num_tokens, now_s = sum(map(stage.shape.num_tokens, sizes)), clock_of(device)
    found = {}
    for word, kind in kinds.items():
        memory, seconds = MemoryStrategy(kind), []
        for number in range(WARMUPS + REPEATS):
            each = []
            for tower in towers:
                started_s = now_s()
                tower(inputs, sizes, memory).float().sum().backward()
                each.append(now_s() - started_s)
            if number >= WARMUPS:
                seconds.append(each[0] - each[1])
        deep, one = (kept_nbytes(partial(tower, inputs, sizes, memory), device) for tower in towers)
        more = depths[0] - depths[1]
        layer_s = max(statistics.median(seconds) / more, _LEAST_S)
        found[word] = LayerTimes(num_tokens, layer_s, max(deep - one, 0) / more)
    return found
