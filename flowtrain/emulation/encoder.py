"""An encoder on emulated devices: leases, bytes and reports are real; a forward is a wait, its features are zeros."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch

from flowtrain.actors.encoder import Encoder, PixelValues, Work
from flowtrain.actors.spans import SpanLog
from flowtrain.config.run import RunConfig
from flowtrain.emulation.process import EmulatedProcess, empty_pixels
from flowtrain.models.encoder import VisionEncoder
from flowtrain.types.messages import ImageBytes
from flowtrain.types.samples import Rejection, SampleRef


class EmulatedEncoder(Encoder):
    """A replica of an encoder, on as many emulated devices as it has tensor parallel ranks.

    replica: which one, among those of its module.
    """

    def __init__(
        self, process: EmulatedProcess, replica: int, config: RunConfig, encoder: str, name: str, run_id: str
    ) -> None:
        super().__init__(config, encoder, name, run_id)
        self._spans = SpanLog(f"{name} (emulated)")
        self._process, self._tp = process, self._settings.tensor_parallel_size
        self._clock = process.clock(encoder, replica * self._tp, self._tp)

    def open_rendezvous(self) -> int:
        """No rank of the replica meets another."""
        return 0

    def _load_tower(self) -> VisionEncoder:
        return cast(VisionEncoder, _NoTower())

    def _load(self, ref: SampleRef, images: ImageBytes, data: np.ndarray) -> PixelValues | Rejection:
        encoded = [image.data for image in np.split(data, np.cumsum(images.nbytes)[:-1])]
        family, limit = self._process.family, self._config.data.max_image_pixels
        return empty_pixels(family, self._encoder, ref, encoded, limit)

    def encode(self, work: Work) -> dict[int, list[torch.Tensor]]:
        """Wait as long as the forward would take; the features are zeros."""
        at = self._clock.now()
        layouts = {
            position: [self._process.family.tile_layout(self._encoder, *each.shape[:0:-1]) for each in arrays]
            for position, arrays in work.pixels.items()
            if arrays
        }
        patches = [layout.num_patches for each in layouts.values() for layout in each]
        end = self._clock.compute(self._process.times(self._encoder).images_s(self._encoder, patches, self._tp), at)
        produced = [position for position in work.lease.needed if position in layouts]
        self._spans.add("encode", at, end, produces=produced, images=len(patches), unit=work.lease.batch.unit)
        zero = torch.zeros(1, self._family.pooled_dim(self._encoder))
        return {position: [zero.expand(layout.num_rows, -1) for layout in each] for position, each in layouts.items()}


class EmulatedEncoderRank:
    """Another rank of a replica: its device computes when the replica's does, which that alone waits for."""

    def __init__(self, process: EmulatedProcess, config: RunConfig, encoder: str, leader: str, rank: int) -> None:
        self._arguments = process, config, encoder, leader, rank

    def run(self, port: int) -> None:
        """Return at once."""


class _NoTower:
    def to(self, *args: Any) -> _NoTower:
        return self
