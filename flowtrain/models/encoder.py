"""A frozen vision tower that turns pixel values into feature rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class VisionEncoder(nn.Module):
    """A frozen HF vision tower. It computes only up to the hidden state that becomes the features.

    feature_layer: index into HF's ``hidden_states`` (0 is the embedding, negative from the end). drop_first: drop the
    leading (class) token, as HF Llava's ``vision_feature_select_strategy: default``.
    """

    announce: Callable[[Tensor], None] | None = None
    """Set if the tower's layers are split: gets every batch before its forward, so that the other ranks forward it too.
    """

    def __init__(self, tower: PreTrainedModel, *, feature_layer: int, drop_first: bool) -> None:
        super().__init__()
        self.tower = tower.eval().requires_grad_(False)
        self._state = feature_layer % (tower.config.num_hidden_layers + 1)
        self._drop_first = drop_first
        self._tower_kwargs: dict[str, bool] = {}
        self._tapped: Tensor | None = None
        self._tap_last_needed_layer()

    def interpolate_positions(self) -> None:
        """Let the tower interpolate its position encoding to each image's size."""
        self._tower_kwargs["interpolate_pos_encoding"] = True

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
            rows = self._hidden_state(batch)
            features |= zip(indices, rows[:, 1:] if self._drop_first else rows, strict=True)
        return [features[index] for index in range(len(pixel_values))]

    @torch.inference_mode()
    def forward(self, pixel_values: Tensor) -> Tensor:
        """Forward images ``[B, C, H, W]`` of one shape, in the tower's type; returns all rows of the hidden state."""
        return self._hidden_state(pixel_values)

    def _hidden_state(self, pixel_values: Tensor) -> Tensor:
        """The chosen hidden state, ``[B, rows, D]`` with the class token."""
        if self._tap is None:
            return self.tower(pixel_values, output_hidden_states=True, **self._tower_kwargs).hidden_states[self._state]
        self.tower(pixel_values, **self._tower_kwargs)
        tapped, self._tapped = self._tapped, None
        assert tapped is not None
        return tapped

    def _tap_last_needed_layer(self) -> None:
        """Remove the layers after the chosen hidden state, and record the output of the last one kept.

        The output is recorded by a hook and not read from ``hidden_states``, because some towers replace its last entry
        by the normalised output. The first and the last state are still read from ``hidden_states``.
        """
        self._tap = None
        encoder = getattr(self.tower, "encoder", None)
        name = next(
            (name for name in ("layers", "layer") if isinstance(getattr(encoder, name, None), nn.ModuleList)), None
        )
        if name is None or not 0 < self._state < len(getattr(encoder, name)):
            return
        layers = getattr(encoder, name)[: self._state]
        setattr(encoder, name, layers)

        def keep(module: nn.Module, args: tuple[object, ...], output: Tensor | tuple[Tensor, ...]) -> None:
            self._tapped = output[0] if isinstance(output, tuple) else output

        self._tap = layers[-1].register_forward_hook(keep)
