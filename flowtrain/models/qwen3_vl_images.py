"""Images as Qwen3-VL's processor gives them: resized by its rule, as pixel values instead of patches."""

from __future__ import annotations

from functools import cached_property
from typing import Any, cast

import numpy as np
from PIL import Image
from transformers import BaseImageProcessor, PreTrainedConfig, Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from flowtrain.errors import ConfigError
from flowtrain.models.image_processing import look_up

_FEWEST_PIXELS, _MOST_PIXELS = 1 << 16, 1 << 24
"""Of Qwen3-VL's own checkpoints."""


def usual_processor(vision_config: PreTrainedConfig) -> Qwen2VLImageProcessorPil:
    """The image processor that Qwen3-VL's checkpoints have, for a tower's patches."""
    return Qwen2VLImageProcessorPil(
        patch_size=vision_config.patch_size,
        temporal_patch_size=vision_config.temporal_patch_size,
        merge_size=vision_config.spatial_merge_size,
        size={"shortest_edge": _FEWEST_PIXELS, "longest_edge": _MOST_PIXELS},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )


def check_processor(processor: BaseImageProcessor, vision_config: PreTrainedConfig, key: str, max_pixels: int) -> None:
    """Raise ConfigError, naming the configuration ``key`` of the encoder, if a processor does not fit a tower.

    max_pixels: ``data.max_image_pixels``.
    """
    if not isinstance(processor, Qwen2VLImageProcessorPil):
        raise ConfigError(
            f"{key}.image_processor: {type(processor).__name__} gives no patches in merge units; qwen3_vl needs a "
            "Qwen2VLImageProcessor"
        )
    expected = {
        "patch_size": vision_config.patch_size,
        "temporal_patch_size": vision_config.temporal_patch_size,
        "merge_size": vision_config.spatial_merge_size,
        "do_resize": True,
    }
    for name, value in expected.items():
        if (found := getattr(processor, name)) != value:
            raise ConfigError(f"{key}.image_processor.{name} ({found}) is not {value}, what the tower needs")
    size: Any = processor.size
    if not size.shortest_edge or not size.longest_edge:
        raise ConfigError(
            f"{key}.image_processor.size ({size}) needs shortest_edge and longest_edge: the fewest and the most pixels "
            "of a resized image"
        )
    if size.shortest_edge > max_pixels:
        raise ConfigError(
            f"{key}.image_processor.size.shortest_edge ({size.shortest_edge}), to which small images are enlarged, is "
            f"more than data.max_image_pixels ({max_pixels}); lower the first or raise the second"
        )


class UnitImages:
    """Resized images of one processor; their sides are multiples of a merge unit's."""

    def __init__(self, processor: Qwen2VLImageProcessorPil) -> None:
        self._processor = processor

    @property
    def _side(self) -> int:
        """Of a merge unit, in pixels."""
        return int(self._processor.patch_size * self._processor.merge_size)

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Height and width (pixels) of an image of this size once resized; raises ValueError as the processor does."""
        size: Any = self._processor.size
        found: tuple[int, int] = smart_resize(
            height, width, self._side, min_pixels=size.shortest_edge, max_pixels=size.longest_edge
        )
        return found

    def pixels(self, image: Image.Image) -> np.ndarray:
        """The processor's pixel values, bit for bit, but not cut into patches: float32 ``[C, H, W]``."""
        rgb = image if image.mode == "RGB" else image.convert("RGB")
        return self._processed(rgb) if self._table is None else look_up(self._table, self._only_resized(rgb))

    def _processed(self, image: Image.Image) -> np.ndarray:
        """Let the processor do all, and put its patches together again; they hold each frame of a clip."""
        processor = self._processor
        output = processor(images=image, return_tensors="np")
        _, rows, columns = output["image_grid_thw"][0].tolist()
        patch, merge = processor.patch_size, processor.merge_size
        frames = (-1, processor.temporal_patch_size, patch, patch)
        units = output["pixel_values"].reshape(rows // merge, columns // merge, merge, merge, *frames)[..., 0, :, :]
        pixels = units.transpose(4, 0, 2, 5, 1, 3, 6).reshape(-1, rows * patch, columns * patch)
        return np.ascontiguousarray(pixels, dtype=np.float32)

    def _only_resized(self, image: Image.Image) -> np.ndarray:
        """The resized image, uint8 ``[C, H, W]``."""
        processor, size = self._processor, cast("Any", self._processor.size)
        pixels = np.moveaxis(np.asarray(image), -1, 0)
        return np.asarray(processor.resize(pixels, size=size, resample=processor.resample, factor=self._side))

    @cached_property
    def _table(self) -> np.ndarray | None:
        """What the processor makes of each 8-bit value after resizing, float32 ``[3, 256]``; None: it does more."""
        processor, values = self._processor, np.tile(np.arange(256, dtype=np.uint8).reshape(1, 16, 16), (3, 1, 1))
        noise = np.random.default_rng(0).integers(0, 256, (3 * self._side + 5, 2 * self._side + 3, 3), dtype=np.uint8)
        try:
            if processor.do_rescale:
                values = processor.rescale(values, processor.rescale_factor)
            if processor.do_normalize:
                values = processor.normalize(values, processor.image_mean, processor.image_std)
            table = np.ascontiguousarray(values.reshape(3, 256), dtype=np.float32)
            plain, resized = self._processed(Image.fromarray(noise)), self._only_resized(Image.fromarray(noise))
        except (TypeError, ValueError, AttributeError):  # another release of the class
            return None
        if resized.dtype != np.uint8 or resized.shape != plain.shape:
            return None
        return table if np.array_equal(look_up(table, resized), plain) else None
