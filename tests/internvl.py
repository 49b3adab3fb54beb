"""A tiny InternVL and HF's own processor of it, for tests of several rooms."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from transformers import GotOcr2ImageProcessorPil, InternVLProcessor

from flowtrain.models.families.internvl import InternVLFamily

TILE = 28
"""Side of a tile in pixels: 4 x 4 patches, 4 feature rows."""
VISION: dict[str, Any] = {
    "model_type": "internvl_vision",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": [TILE, TILE],
    "patch_size": [7, 7],
    "layer_scale_init_value": 0.6,
}
NORMED_VISION: dict[str, Any] = {
    **VISION,
    "use_qk_norm": True,
    "norm_type": "rms_norm",
    "attention_bias": True,
    "use_mask_token": True,
}
"""As InternViT-6B has it, and with what no published tower has."""
PROCESSOR = {"min_patches": 1, "max_patches": 6}


class StockProcessor(InternVLProcessor):
    """HF's processor without its check of the video processor's class, which cannot be made without torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        if argument_name == "video_processor":
            return type(argument)
        return super().check_argument_for_proper_class(argument_name, argument)


def stock_processor(family: InternVLFamily, **settings: Any) -> StockProcessor:
    """HF's processor for a family's tokenizer and tiles. settings: the image processor's, beside the size of a tile."""
    images = GotOcr2ImageProcessorPil(size={"height": TILE, "width": TILE}, **settings)
    return StockProcessor(images, family.tokenizer, None, image_seq_length=4)


def stock_pixels(family: InternVLFamily, images: list[Image.Image]) -> torch.Tensor:
    """Pixel values of all tiles by HF's image processor, called as HF's processor calls it."""
    pixels: torch.Tensor = family.image_processor(images, crop_to_patches=True, return_tensors="pt")["pixel_values"]
    return pixels
