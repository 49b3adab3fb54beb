"""Encoded images: their size from the header alone, and their pixels in the format of Hugging Face's processors.

Pillow reads both. Only raster formats are opened (for EPS, Pillow would start an interpreter). Orientation tags are not
applied and ``convert("RGB")`` drops transparency, so results equal those of a plain Hugging Face pipeline.
"""

from __future__ import annotations

import io
from functools import cache

from PIL import Image, UnidentifiedImageError

from flowtrain.data.sources.base import BadSample
from flowtrain.types.samples import RejectReason

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")


def image_size(data: bytes, max_pixels: int | None = None) -> tuple[int, int]:
    """Return (width, height) in pixels from the header, without decoding.

    Raises BadSample: CORRUPT_IMAGE if no header is readable, DECOMPRESSION_BOMB above ``max_pixels`` (None: above
    Pillow's limit).
    """
    return _open(data, max_pixels).size


def decode_image(data: bytes, max_pixels: int | None = None) -> Image.Image:
    """Return an image as RGB; raises BadSample as ``image_size``, and CORRUPT_IMAGE for truncated or damaged data."""
    image = _open(data, max_pixels)
    try:
        return image.convert("RGB")
    except MemoryError:
        raise  # a fault of the machine, not of the image
    except Exception as error:  # the bytes are in memory, so any other decoder error is a fault of the image
        raise _corrupt(data, error) from error


def _open(data: bytes, max_pixels: int | None) -> Image.Image:
    if max_pixels is not None:
        _raise_pillow_limit(max_pixels)
    try:
        image = Image.open(io.BytesIO(data), formats=_known_formats())
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadSample(RejectReason.DECOMPRESSION_BOMB, str(error)) from error
    except MemoryError:
        raise
    except Exception as error:  # as in decode_image
        raise _corrupt(data, error) from error
    width, height = image.size
    if max_pixels is not None and width * height > max_pixels:
        raise BadSample(
            RejectReason.DECOMPRESSION_BOMB,
            f"{width} x {height} = {width * height} pixels is above data.max_image_pixels ({max_pixels})",
        )
    return image


def _corrupt(data: bytes, error: Exception) -> BadSample:
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
