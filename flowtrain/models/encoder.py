"""A frozen vision tower that turns pixel values into feature rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flowtrain.models.vision_stage import VisionStage


class VisionEncoder(nn.Module):
    """A frozen HF vision tower in a process of its own. It is a whole ``VisionStage``; so are its arguments."""

    announce: Callable[[Tensor], None] | None = None
    """Set if the tower's layers are split: gets every batch before its forward, so that the other ranks forward it too.
    """

    def __init__(self, tower: PreTrainedModel, *, feature_layer: int, drop_first: bool, shuffle: int = 1) -> None:
        super().__init__()
        self.stage = VisionStage(tower, feature_layer=feature_layer, drop_first=drop_first, shuffle=shuffle)

    @property
    def tower(self) -> PreTrainedModel:
        """What is computed of the tower."""
        return self.stage.tower

    def interpolate_positions(self) -> None:
        """Let the tower interpolate its position encoding to each image's size."""
        self.stage.interpolates = True

    @torch.inference_mode()
    def encode(self, pixel_values: Sequence[np.ndarray]) -> list[Tensor]:
        """Encode images, each float32 ``[C, H, W]``, into features ``[num_rows, feature_dim]``, in the same order.

        Images of one shape are forwarded together, in the order in which the shapes first occur. So the result depends
        on the batch alone. Features have the tower's type and are on its device.
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, pixels in enumerate(pixel_values):
            groups.setdefault(pixels.shape, []).append(index)
        features: dict[int, Tensor] = {}
        for indices in groups.values():
            batch = torch.from_numpy(np.stack([pixel_values[index] for index in indices]))
            batch = batch.to(self.tower.device, self.tower.dtype)
            if self.announce is not None:
                self.announce(batch)
            features |= zip(indices, self(batch), strict=True)
        return [features[index] for index in range(len(pixel_values))]

    @torch.inference_mode()
    def forward(self, pixel_values: Tensor) -> Tensor:
        """Forward images ``[B, C, H, W]`` of one shape, in the tower's type; returns features ``[B, rows, D]``."""
        (rows,) = self.stage.run([pixel_values])
        return rows
