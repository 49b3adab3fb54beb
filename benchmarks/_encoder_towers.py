"""Towers, images and contenders of the encoder benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowtrain.config.run import RunConfig
from flowtrain.models.families.base import Family
from flowtrain.models.families.registry import family_from_config
from flowtrain.models.families.variable import VariableLlavaFamily
from flowtrain.models.towers import TOWERS

VISION = "vision"
TOKENIZER = str(Path(__file__).resolve().parents[1] / "assets" / "tokenizer")
MODELS: dict[str, dict[str, Any]] = {
    "dinov2-s14": {
        "model_type": "dinov2",
        "hidden_size": 384,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
        "image_size": 518,
        "patch_size": 14,
    },
    "siglip-b16": {
        "model_type": "siglip_vision_model",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 256,
        "patch_size": 16,
    },
}
STANDARD_SIZES = (
    (640, 480),
    (854, 480),
    (800, 600),
    (1024, 768),
    (1280, 720),
    (1440, 1080),
    (1620, 1080),
    (1920, 1080),
)
ASPECTS = (1.0, 5 / 4, 4 / 3, 3 / 2, 16 / 9)


def natural_sizes(count: int, seed: int) -> list[tuple[int, int]]:
    """Widths and heights between 480p and 1080p: half of them standard sizes, half cropped freely; a third upright."""
    rng, sizes = np.random.default_rng(seed), []
    for number in range(count):
        if number % 2:
            width, height = STANDARD_SIZES[rng.integers(len(STANDARD_SIZES))]
        else:
            height = int(rng.integers(480, 1081))
            width = min(1920, round(height * float(rng.choice(ASPECTS)) * rng.uniform(0.95, 1.05)))
        sizes.append((height, width) if rng.random() < 1 / 3 else (width, height))
    return sizes


def family_of(model: str, dtype: str, longest: int) -> VariableLlavaFamily:
    """``variable_llava`` with a random tower; longest: pixels of an image's longer side."""
    text = {
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 4096,
    }
    values = {
        "name": "encoder",
        "model": {"family": "variable_llava", "tokenizer": TOKENIZER, "dtype": dtype, "device": "cpu"},
        "encoders": {
            VISION: {
                "config": MODELS[model],
                "image_processor": {"size": {"longest_edge": longest}},
                "feature_layer": -1,
            }
        },
        "backbone": {"config": text},
        "data": {"sources": [{"path": "unused.parquet"}]},
    }
    family = family_from_config(RunConfig.model_validate(values))
    assert isinstance(family, VariableLlavaFamily)
    return family


def pixels_of(family: Family, sizes: Sequence[tuple[int, int]], seed: int) -> list[np.ndarray]:
    """Noise in the size at which each image enters the tower, float32 ``[C, H, W]``."""
    rng = np.random.default_rng(seed)
    entering = [family.entering_size(VISION, *size) for size in sizes]
    return [rng.standard_normal((3, *size), dtype=np.float32) for size in entering]


def patches_of(family: Family, image: np.ndarray) -> int:
    """Patches of an image as it enters the tower."""
    return family.tile_layout(VISION, image.shape[2], image.shape[1]).num_patches


def batches(family: Family, images: Sequence[np.ndarray], most: int) -> Iterator[list[np.ndarray]]:
    """Consecutive images of at most so many patches together, as encoder actors get them."""
    batch: list[np.ndarray] = []
    total = 0
    for image in images:
        count = patches_of(family, image)
        if batch and total + count > most:
            yield batch
            batch, total = [], 0
        batch.append(image)
        total += count
    if batch:
        yield batch


class PlainTower:
    """HF's tower, up to the features' layer, over images of one shape at a time: as before, or image by image."""

    def __init__(self, family: VariableLlavaFamily) -> None:
        self.dtype: torch.dtype = getattr(torch, family.config.model.dtype)
        self._tower = family._load_tower().to(self.dtype).eval().requires_grad_(False)
        self._tower.set_attn_implementation("sdpa")
        self._kind = TOWERS[self._tower.config.model_type]
        self._drops_first = self._tower.config.model_type != "siglip_vision_model"
        layers: Any = self._tower.get_submodule(self._kind.layers)
        self._layers: list[nn.Module] = list(layers)[: family.num_encoder_layers(VISION)]

    def by_shape(self, images: Sequence[np.ndarray]) -> list[Tensor]:
        """One forward for each shape, in the order in which they first occur."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, image in enumerate(images):
            groups.setdefault(image.shape, []).append(index)
        rows: dict[int, Tensor] = {}
        for indices in groups.values():
            rows |= zip(indices, self._forward([images[index] for index in indices]), strict=True)
        return [rows[index] for index in range(len(images))]

    def one_by_one(self, images: Sequence[np.ndarray]) -> list[Tensor]:
        """One forward for each image."""
        return [self._forward([image])[0] for image in images]

    @torch.inference_mode()
    def _forward(self, images: Sequence[np.ndarray]) -> Tensor:
        options = {"interpolate_pos_encoding": True} if self._kind.interpolation == "flag" else {}
        states = self._tower.get_submodule("embeddings")(torch.from_numpy(np.stack(images)).to(self.dtype), **options)
        if self._kind.pre_norm is not None:
            states = self._tower.get_submodule(self._kind.pre_norm)(states)
        for layer in self._layers:
            output = layer(states, None)
            states = output[0] if isinstance(output, tuple) else output
        return states[:, 1:] if self._drops_first else states
