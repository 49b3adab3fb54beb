"""Encoded images: their size from the header alone, and their pixels in the format of Hugging Face's processors.

Pillow reads both. Only raster formats are opened (for EPS, Pillow would start an interpreter). Orientation tags are not
applied and ``convert("RGB")`` drops transparency, so results equal those of a plain Hugging Face pipeline.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from PIL import Image, UnidentifiedImageError

from flowtrain.data.rejections import errors_of_image, is_of_sample, rejected
from flowtrain.data.sources.base import BadSample
from flowtrain.types.samples import Rejection, RejectReason, SampleRef

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")


def image_size(data: bytes | memoryview, max_pixels: int | None = None) -> tuple[int, int]:
    """Return (width, height) in pixels from the header, without decoding; both are at least 1.

    Raises BadSample: CORRUPT_IMAGE if no header is readable, DECOMPRESSION_BOMB above ``max_pixels`` (None: above
    Pillow's limit).
    """
    return _open(data, max_pixels).size


def decode_image(data: bytes | memoryview, max_pixels: int | None = None) -> Image.Image:
    """Return an image as RGB in the size that ``image_size`` gives.

    Raises BadSample as ``image_size``, and CORRUPT_IMAGE for truncated or damaged data.
    """
    image = _open(data, max_pixels)
    size = image.size
    try:
        decoded = image.convert("RGB")
    except BaseException as error:  # the bytes are in memory, so any decoder's error is a fault of the image
        if not is_of_sample(error):
            raise
        raise _corrupt(data, error) from error
    if decoded.size != size:
        raise BadSample(RejectReason.CORRUPT_IMAGE, f"the header says {size}, but {decoded.size} pixels were decoded")
    return decoded


def pixels_of_sample(
    ref: SampleRef,
    images: Sequence[bytes | memoryview],
    max_pixels: int,
    preprocess: Callable[[Image.Image], np.ndarray],
    paths: Sequence[str | None] | None = None,
) -> list[np.ndarray] | Rejection:
    """Decode and preprocess a sample's images, in order, each tile apart; a rejection if one of them cannot be.

    paths: the file of each image, for the rejection; None where they are not known, as in encoders.
    """
    pixels = []
    try:
        for number, data in enumerate(images, start=1):
            with errors_of_image(number, len(images), paths[number - 1] if paths else None):
                pixels += tiles_of(preprocess(decode_image(data, max_pixels)))
    except BadSample as error:
        return rejected(ref, error)
    return pixels


def tiles_of(pixels: np.ndarray) -> list[np.ndarray]:
    """Return an image's tiles, ``[C, H, W]`` each, in order: itself, or those of an image ``[T, C, H, W]``."""
    return list(pixels) if pixels.ndim == 4 else [pixels]


def _open(data: bytes | memoryview, max_pixels: int | None) -> Image.Image:
    if max_pixels is not None:
        _raise_pillow_limit(max_pixels)
    try:
        image = Image.open(io.BytesIO(data), formats=_known_formats())
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _bomb(str(error), max_pixels) from error
    except BaseException as error:  # as in decode_image
        if not is_of_sample(error):
            raise
        raise _corrupt(data, error) from error
    width, height = image.size
    if max_pixels is not None and width * height > max_pixels:
        raise _bomb(f"{width} x {height} = {width * height} pixels", max_pixels)
    return image


def _bomb(found: str, max_pixels: int | None) -> BadSample:
    """found: the size, or Pillow's message, of whose two numbers the first is the size and the second its own limit."""
    if max_pixels is not None:
        pixels = re.match(r"Image size \((\d+) pixels\)", found)
        size = f"{pixels[1]} pixels" if pixels else found
        found = f"{size} are more than data.max_image_pixels ({max_pixels})"
    return BadSample(RejectReason.DECOMPRESSION_BOMB, found)


def _corrupt(data: bytes | memoryview, error: BaseException) -> BadSample:
    # Pillow's message for unknown data contains an object's address, which differs from run to run.
    unknown = isinstance(error, UnidentifiedImageError)
    detail = "no known image format" if unknown else f"{type(error).__name__}: {error}"
    return BadSample(RejectReason.CORRUPT_IMAGE, f"{len(data)} bytes: {detail}"[:300])


def _raise_pillow_limit(max_pixels: int) -> None:
    """Raise Pillow's process-wide limit to what the configuration allows; it is never lowered."""
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and limit < max_pixels:
        Image.MAX_IMAGE_PIXELS = max_pixels


@cache
def _known_formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)
