"""Qwen3-VL in the encoder benchmark: a tower as wide as those of its 2B and 4B models, and HF's own packed call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowtrain.config.run import RunConfig
from flowtrain.data.images import decode_image
from flowtrain.models.families.qwen3_vl import Qwen3VLFamily
from flowtrain.models.families.registry import family_from_config

VISION = "vision"
TOKENIZER = str(Path(__file__).resolve().parents[1] / "assets" / "tokenizer")
TOWER: dict[str, Any] = {
    "model_type": "qwen3_vl_vision",
    "depth": 3,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 2048,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [1],
}
"""3 of 24 layers, since all of them would take minutes an image; so mergers weigh more than in the whole tower."""
TEXT: dict[str, Any] = {
    "model_type": "qwen3_vl_text",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 4224,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
}
"""Never computed; the connector's width fits it."""
Packed = tuple[Tensor, Tensor]
"""What HF's processor gives for some images: patches, float32 ``[P, C * T * patch ** 2]``, and grids ``[N, 3]``."""


def qwen3_vl_family(dtype: str) -> Qwen3VLFamily:
    """``qwen3_vl`` with random weights; its connector is frozen, so encoders merge, as HF's tower does."""
    values = {
        "name": "encoder",
        "model": {
            "family": "qwen3_vl",
            "tokenizer": TOKENIZER,
            "dtype": dtype,
            "device": "cpu",
            "freeze": ["connector"],
        },
        "encoders": {VISION: {"config": TOWER}},
        "backbone": {"config": TEXT},
        "data": {"sources": [{"path": "unused.parquet"}]},
    }
    family = family_from_config(RunConfig.model_validate(values))
    assert isinstance(family, Qwen3VLFamily)
    return family


class PackedTower:
    """HF's tower with its mergers, in its own packed call: one forward over the patches of all images.

    Its attention on a CPU is SDPA, image by image. The patches are cut beforehand, as HF's processor does it; ours are
    cut within the forward.
    """

    def __init__(self, family: Qwen3VLFamily) -> None:
        self._dtype: torch.dtype = getattr(torch, family.config.model.dtype)
        self._config = family.vision_config
        tower = family._load_tower()
        mergers = {name.removeprefix("connector."): value for name, value in family.merged_connector().items()}
        missing, unexpected = tower.load_state_dict(mergers, strict=False)
        assert not unexpected and not any("merger" in name for name in missing), (missing, unexpected)
        self._tower = tower.to(self._dtype).eval().requires_grad_(False)
        self._tower.set_attn_implementation("sdpa")

    def prepare(self, images: Sequence[np.ndarray]) -> Packed:
        """Cut images, float32 ``[C, H, W]``, into patches."""
        patch, config = self._config.patch_size, self._config
        patches = [hf_patches(image, patch, config.spatial_merge_size, config.temporal_patch_size) for image in images]
        grids = [[1, image.shape[1] // patch, image.shape[2] // patch] for image in images]
        return torch.from_numpy(np.concatenate(patches)), torch.tensor(grids)

    @torch.inference_mode()
    def encode(self, packed: Packed) -> list[Tensor]:
        """Rows of each image: of the merger, and of the deepstack mergers, side by side."""
        patches, grids = packed
        output = self._tower(patches.to(self._dtype), grid_thw=grids, return_dict=True)
        rows = torch.cat([output.pooler_output, *output.deepstack_features], dim=1)
        return list(rows.split((grids.prod(1) // self._config.spatial_merge_size**2).tolist()))


def hf_patches(image: np.ndarray, patch: int, merge: int, frames: int) -> np.ndarray:
    """Patches of an image ``[C, H, W]`` as HF's processor orders them: ``[P, C * T * patch ** 2]``."""
    channels, height, width = image.shape
    rows, columns = height // patch, width // patch
    clip = np.broadcast_to(image, (frames, *image.shape))
    cut = clip.reshape(frames, channels, rows // merge, merge, patch, columns // merge, merge, patch)
    return np.ascontiguousarray(cut.transpose(2, 5, 3, 6, 1, 0, 4, 7)).reshape(rows * columns, -1)


def qwen3_vl_decoders(family: Qwen3VLFamily) -> dict[str, Callable[[bytes], np.ndarray]]:
    """From a JPEG to pixel values: HF's processor, which also cuts patches, and ours."""
    processor = family.image_processor

    def hf(data: bytes) -> np.ndarray:
        return np.asarray(processor(images=decode_image(data), return_tensors="np")["pixel_values"], np.float32)

    return {"pil+hf": hf, "ours": lambda data: family.preprocess(VISION, decode_image(data))}
