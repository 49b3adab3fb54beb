"""A variable-resolution Llava: an image keeps its aspect ratio, and its number of patches follows its size."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from PIL import Image

from flowtrain.models.families.llava import LlavaFamily
from flowtrain.models.image_processing import pixel_values, setting
from flowtrain.models.towers import image_size
from flowtrain.models.vision_stage import VisionStage
from flowtrain.types.samples import ImageLayout

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, PreTrainedModel


class VariableLlavaFamily(LlavaFamily):
    """Llava whose tower sees each image at its own size, with an interpolated position encoding.

    Sides are rounded to multiples of the patch size, at least one patch. An image is shrunk, never enlarged, so that
    its longer side is at most the image processor's ``size.longest_edge`` (by default the tower's ``image_size``).

    The export is a Llava checkpoint too, with two differences in use. Its processor does not resize, so resize images
    with ``resize`` first, and give one size a batch. For a tower other than DINOv2, HF's Llava does not pass the
    interpolation flag to the tower, so compute the features with
    ``model.get_image_features(pixel_values, interpolate_pos_encoding=True, return_dict=True)`` and pass them to the
    model as ``mm_encoder_outputs={"image": features}``.
    """

    name: ClassVar[str] = "variable_llava"
    image_hint: ClassVar[str | None] = "image_processor: {size: {longest_edge: 448}} # the most pixels of a side"

    @cached_property
    def _longest_edge(self) -> int:
        """The longest side of a resized image, in pixels."""
        size = setting(self._given_processor, "size")
        return getattr(size, "longest_edge", None) or max(image_size(self.vision_config))

    @cached_property
    def image_processor(self) -> BaseImageProcessor:
        """Without resizing, so that it only normalises."""
        processor = self._given_processor
        settings = {"do_resize": False, "do_center_crop": False, "size": {"longest_edge": self._longest_edge}}
        return type(processor)(**{**processor.to_dict(), **settings})

    @property
    def _image_seq_length(self) -> int:
        return int(self.hf_config.image_seq_length)  # it depends on the image

    @property
    def _max_patches_per_side(self) -> int:
        return max(1, self._longest_edge // self._patch_size)

    def resized_size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height (pixels) at which an image enters the tower."""
        limit = self._max_patches_per_side
        scale = min(1.0, limit * self._patch_size / max(width, height))
        sides = (min(limit, max(1, round(side * scale / self._patch_size))) for side in (width, height))
        new_width, new_height = (side * self._patch_size for side in sides)
        return new_width, new_height

    def resize(self, image: Image.Image) -> Image.Image:
        """Resize an image to the size at which it enters the tower."""
        rgb = image if image.mode == "RGB" else image.convert("RGB")
        return rgb.resize(self.resized_size(*rgb.size), Image.Resampling.BICUBIC)

    def image_layout(self, encoder: str, width: int, height: int) -> ImageLayout:
        """Patches of the resized image."""
        new_width, new_height = self.resized_size(width, height)
        return self._layout_of(new_height, new_width)

    def entering_size(self, encoder: str, width: int, height: int) -> tuple[int, int]:
        """That of the resized image."""
        new_width, new_height = self.resized_size(width, height)
        return new_height, new_width

    def preprocess(self, encoder: str, image: Image.Image) -> np.ndarray:
        """Pixel values of the resized image, float32 ``[C, H, W]``."""
        return pixel_values(self.image_processor, self.resize(image))

    def _stage_of(self, tower: PreTrainedModel, *, trainable: bool = False) -> VisionStage:
        """With interpolated position encodings."""
        stage = super()._stage_of(tower, trainable=trainable)
        stage.interpolates = self._tower_kind.interpolation == "flag"
        return stage
