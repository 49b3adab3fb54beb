"""HF image processors: loading, output sizes, and pixel values."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from PIL import Image
from transformers import AutoImageProcessor, BaseImageProcessor, PreTrainedConfig

from flowtrain.errors import ConfigError
from flowtrain.models.towers import image_size, tower_kind
from flowtrain.models.weights import did_you_mean, in_a_line

logger = logging.getLogger(__name__)

_SETTINGS_FILES = ("preprocessor_config.json", "processor_config.json")


def load_image_processor(
    path: str | None, vision_config: PreTrainedConfig, overrides: Mapping[str, Any], key: str
) -> BaseImageProcessor:
    """The image processor of a checkpoint, or the tower's usual one for its ``image_size``; as ``processor_or``."""

    def usual() -> BaseImageProcessor:
        kind = tower_kind(vision_config, key)
        processor: BaseImageProcessor = getattr(transformers, kind.image_processor)(
            **kind.fitted_size(*image_size(vision_config))
        )
        return processor

    return processor_or(usual, path, overrides, key)


def processor_or(
    usual: Callable[[], BaseImageProcessor], path: str | None, overrides: Mapping[str, Any], key: str
) -> BaseImageProcessor:
    """The image processor of a checkpoint, or the usual one; always the PIL variant.

    The torchvision variant gives other pixels, so it is never used. overrides: settings that replace the processor's.
    key: configuration key of the encoder. Raises ConfigError for a setting that the processor does not have.
    """
    processor = (_of_checkpoint(path, key) if path is not None else None) or usual()
    for name in overrides:
        if not hasattr(processor, name):
            hint = did_you_mean(name, processor.to_dict())
            raise ConfigError(f"{key}.image_processor.{name} is no setting of {type(processor).__name__}{hint}")
    return _overridden(processor, overrides, f"{key}.image_processor") if overrides else processor


def _overridden(processor: BaseImageProcessor, overrides: Mapping[str, Any], key: str) -> BaseImageProcessor:
    try:
        return type(processor)(**{**processor.to_dict(), **overrides})
    except Exception as error:  # HF's classes compute with values that nothing has checked
        raise unusable(key, type(processor).__name__, overrides, error) from error


def unusable(key: str, what: str, overrides: Mapping[str, Any], error: Exception) -> ConfigError:
    """Return the error of an image processor that cannot work with its settings. what: the class, or what it does."""
    return ConfigError(
        f"{key}: {what} cannot use the settings of the image processor ({', '.join(overrides)}): {in_a_line(error)}; "
        "correct them, or leave them out"
    )


def _of_checkpoint(path: str, key: str) -> BaseImageProcessor | None:
    """The checkpoint's image processor, or None if a local directory has no settings for one."""
    folder = Path(path)
    if folder.is_dir() and not any((folder / name).is_file() for name in _SETTINGS_FILES):
        _warn_of_usual(key, path)
        return None
    try:
        return AutoImageProcessor.from_pretrained(path, backend="pil", trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: no image processor can be read from {path!r}: {error}") from error


@cache
def _warn_of_usual(key: str, path: str) -> None:
    """Warn once a process: a start builds a family several times."""
    logger.warning(
        "%s: %s has none of %s: using the tower's usual image processor", key, path, ", ".join(_SETTINGS_FILES)
    )


def fixed_output_size(processor: BaseImageProcessor) -> tuple[int, int] | None:
    """Height and width (pixels) of every output of a processor, or None if they depend on the image."""
    size = None
    if setting(processor, "do_center_crop"):
        size = setting(processor, "crop_size")
    elif setting(processor, "do_resize"):
        size = setting(processor, "size")
    height, width = (getattr(size, name, None) for name in ("height", "width"))
    return None if height is None or width is None else (height, width)


def resized_pixels(processor: BaseImageProcessor, width: int, height: int) -> int:
    """Pixels of an image of this size once a processor has resized it, before it crops it.

    Only a fixed shorter side makes them more than the output's: the longer side grows with the aspect ratio.
    """
    size = setting(processor, "size") if setting(processor, "do_resize") else None
    edge = getattr(size, "shortest_edge", None)
    if edge is None or getattr(size, "longest_edge", None) is not None:
        return width * height
    return int(edge) ** 2 * max(width, height) // min(width, height)


def setting(processor: BaseImageProcessor, name: str) -> Any:
    """A setting of a processor, or None if it has no such setting (HF's base class declares none)."""
    return getattr(processor, name, None)


def pixel_values(processor: BaseImageProcessor, image: Image.Image) -> np.ndarray:
    """Run a processor on one image: float32 ``[C, H, W]``.

    The bits are the processor's own. After resizing, what most processors make of a pixel depends on its 8-bit value
    alone; a look into a table gives it several times faster than their arithmetic.
    """
    rgb = image if image.mode == "RGB" else image.convert("RGB")
    table = _value_table(processor)
    if table is not None:
        values = _processed(processor, rgb, **_NO_ARITHMETIC)
        if values.dtype == np.uint8:
            return look_up(table, values)
    return np.ascontiguousarray(_processed(processor, rgb), dtype=np.float32)


def tile_values(processor: BaseImageProcessor, image: Image.Image, **settings: Any) -> np.ndarray:
    """As ``pixel_values``, of all tiles that a processor makes of an image: ``[T, C, H, W]``.

    settings: of the call, in the place of the processor's own.
    """
    rgb = image if image.mode == "RGB" else image.convert("RGB")
    table = _value_table(processor)
    if table is not None:
        tiles = processor(images=rgb, return_tensors="np", **settings, **_NO_ARITHMETIC)["pixel_values"]
        if tiles.dtype == np.uint8:
            return np.stack([look_up(table, tile) for tile in tiles])
    tiles = processor(images=rgb, return_tensors="np", **settings)["pixel_values"]
    return np.ascontiguousarray(tiles, dtype=np.float32)


_NO_ARITHMETIC: dict[str, Any] = {"do_rescale": False, "do_normalize": False}


def _processed(processor: BaseImageProcessor, image: Image.Image, **settings: Any) -> np.ndarray:
    values: np.ndarray = processor(images=image, return_tensors="np", **settings)["pixel_values"][0]
    return values


@lru_cache(maxsize=16)
def _value_table(processor: BaseImageProcessor) -> np.ndarray | None:
    """What a processor makes of each 8-bit value after resizing, float32 ``[C, 256]``; None: it does more than that."""
    every_value = Image.fromarray(np.repeat(np.arange(256, dtype=np.uint8).reshape(16, 16, 1), 3, axis=2))
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 56, 3), dtype=np.uint8))
    try:
        table = _processed(processor, every_value, do_resize=False, do_center_crop=False)
        plain, values = _processed(processor, noise), _processed(processor, noise, **_NO_ARITHMETIC)
    except (TypeError, ValueError):  # it does not know these settings, or takes no such image
        return None
    if table.shape != (3, 16, 16) or (plain.dtype, values.dtype) != (np.float32, np.uint8):
        return None
    table = np.ascontiguousarray(table.reshape(3, 256), dtype=np.float32)
    return table if np.array_equal(look_up(table, values), plain) else None


def look_up(table: np.ndarray, values: np.ndarray) -> np.ndarray:
    """``table[c, values[c]]`` for each channel."""
    pixels = np.empty(values.shape, np.float32)
    for entries, channel, found in zip(table, values, pixels, strict=True):
        np.take(entries, channel, out=found, mode="clip")  # the default mode would copy the output once more
    return pixels
