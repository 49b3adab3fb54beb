"""A tiny Qwen3-VL, HF's own processor of it, and what its class takes, for tests of several rooms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PIL import Image
from torch import Tensor
from transformers import Qwen2VLImageProcessorPil, Qwen3VLProcessor

from flowtrain.models.families.qwen3_vl import Qwen3VLFamily

UNIT = 8
"""Side of a merge unit in pixels: 2 x 2 patches."""
VISION: dict[str, Any] = {
    "model_type": "qwen3_vl_vision",
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 2],
    "initializer_range": 0.1,
}
TEXT: dict[str, Any] = {
    "model_type": "qwen3_vl_text",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
}
PROCESSOR: dict[str, Any] = {"size": {"shortest_edge": 2 * UNIT * UNIT, "longest_edge": 14 * UNIT * UNIT}}


class StockProcessor(Qwen3VLProcessor):
    """HF's processor without its check of the video processor's class, which cannot be made without torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        if argument_name == "video_processor":
            return type(argument)
        return super().check_argument_for_proper_class(argument_name, argument)


def stock_images(**settings: Any) -> Qwen2VLImageProcessorPil:
    """HF's image processor for the tiny tower. settings: beside its patches."""
    values = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], **PROCESSOR, **settings}
    return Qwen2VLImageProcessorPil(**{"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, **values})


def stock_processor(family: Qwen3VLFamily, **settings: Any) -> StockProcessor:
    """HF's processor for a family's tokenizer."""
    return StockProcessor(stock_images(**settings), family.tokenizer, None)


def stock_inputs(images: Sequence[Image.Image], ids: Tensor, image_token_id: int) -> dict[str, Tensor]:
    """What HF's class takes beside token ids ``[1, T]``, as HF's processor gives it."""
    if not images:
        return {}
    found = stock_images()(list(images), return_tensors="pt")
    return {
        "pixel_values": found["pixel_values"],
        "image_grid_thw": found["image_grid_thw"],
        "mm_token_type_ids": (ids == image_token_id).int(),
    }
