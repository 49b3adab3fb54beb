"""A frozen vision tower that turns pixel values into feature rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flowtrain.models.connector import ConnectorModule
from flowtrain.models.cpu_products import fast_products
from flowtrain.models.encoder_stage import EncoderStage


class VisionEncoder(nn.Module):
    """A frozen vision tower in a process of its own.

    stage: the whole tower. connector: a frozen one that runs here and not in the backbone; what it returns, side by
    side, is then the features.
    """

    announce: Callable[[Tensor, Sequence[Sequence[int]]], None] | None = None
    """Set if the tower's layers are split: gets the arguments of every forward before it, so that other ranks forward
    them too.
    """

    def __init__(self, stage: EncoderStage, connector: ConnectorModule | None = None) -> None:
        super().__init__()
        self.stage = stage
        self.connector = None if connector is None else connector.requires_grad_(False).eval()

    @property
    def tower(self) -> PreTrainedModel:
        """What is computed of the tower."""
        return self.stage.tower

    @torch.inference_mode()
    def encode(self, pixel_values: Sequence[np.ndarray]) -> list[Tensor]:
        """Encode images, each float32 ``[C, H, W]``, into features ``[num_rows, feature_dim]``, in the same order.

        Images of any sizes are forwarded together, so the result depends on the batch alone. Features have the tower's
        type and are on its device.
        """
        if not pixel_values:
            return []
        shapes = [pixels.shape for pixels in pixel_values]
        pixels = torch.from_numpy(np.concatenate([pixels.reshape(-1) for pixels in pixel_values]))
        pixels = pixels.to(self.tower.device, self.tower.dtype)
        if self.announce is not None:
            self.announce(pixels, shapes)
        return list(self(pixels, shapes).split([self.stage.shape.num_rows((shape[1], shape[2])) for shape in shapes]))

    @torch.inference_mode()
    def forward(self, pixels: Tensor, shapes: Sequence[Sequence[int]]) -> Tensor:
        """Forward images; returns the features of all, ``[rows, D]``.

        pixels: of all images back to back, flat, in the tower's type. shapes: ``[C, H, W]`` of each.
        """
        pieces = pixels.split([math.prod(shape) for shape in shapes])
        images = [piece.view(*shape) for piece, shape in zip(pieces, shapes, strict=True)]
        rows = cast(Tensor, self.stage(images, [(shape[1], shape[2]) for shape in shapes]))
        if self.connector is None:
            return rows
        with fast_products(rows):
            merged = self.connector(rows)
        return torch.cat(merged, dim=1) if isinstance(merged, tuple) else cast(Tensor, merged)
