from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from flowtrain.data.images import decode_image, image_size
from flowtrain.data.sources.base import BadSample
from flowtrain.types.samples import RejectReason

Encode = Callable[..., bytes]


def png_header(width: int, height: int) -> bytes:
    """A PNG whose header states width x height pixels and whose data is a few bytes."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("fmt", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_sizes_and_pixels_of_common_formats(encoded_image: Encode, fmt: str) -> None:
    data = encoded_image(13, 7, fmt)
    assert image_size(data, 1000) == (13, 7)
    decoded = decode_image(data, 1000)
    assert decoded.mode == "RGB"
    assert np.array_equal(np.asarray(decoded), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


@pytest.mark.parametrize(
    ("mode", "fmt"), [("P", "PNG"), ("RGBA", "PNG"), ("LA", "PNG"), ("L", "PNG"), ("1", "PNG"), ("I;16", "PNG"),
                      ("CMYK", "JPEG")]
)  # fmt: skip
def test_every_mode_becomes_rgb_as_pillow_does(encoded_image: Encode, mode: str, fmt: str) -> None:
    data = encoded_image(9, 5, fmt, mode)
    assert Image.open(io.BytesIO(data)).mode == mode
    decoded = decode_image(data)
    assert (decoded.mode, decoded.size) == ("RGB", (9, 5))
    assert decoded.tobytes() == Image.open(io.BytesIO(data)).convert("RGB").tobytes()


def test_orientation_tags_are_not_applied() -> None:
    image = Image.new("RGB", (10, 4))
    exif = image.getexif()
    exif[0x0112] = 6  # turned by 90 degrees
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", exif=exif)
    assert image_size(buffer.getvalue()) == decode_image(buffer.getvalue()).size == (10, 4)


@pytest.mark.parametrize(
    "data", [b"", b"no image", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"%!PS-Adobe-3.0 EPSF-3.0\n"]
)
def test_unreadable_headers_are_corrupt(data: bytes) -> None:
    for read in (image_size, decode_image):
        with pytest.raises(BadSample, match=f"{len(data)} bytes") as caught:
            read(data, 1000)
        assert caught.value.reason is RejectReason.CORRUPT_IMAGE
        assert "0x" not in caught.value.detail  # the same text in every run


@pytest.mark.parametrize("fmt", ["PNG", "JPEG", "WEBP"])
def test_truncated_data_is_sized_and_then_corrupt(encoded_image: Encode, fmt: str) -> None:
    whole = encoded_image(64, 64, fmt)
    data = whole[: len(whole) * 2 // 3]
    if fmt != "WEBP":  # its header names the file's length
        assert image_size(data) == (64, 64)
    with pytest.raises(BadSample) as caught:
        decode_image(data)
    assert caught.value.reason is RejectReason.CORRUPT_IMAGE


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@given(st.data(), st.sampled_from(["PNG", "JPEG", "GIF", "TIFF"]))
def test_damaged_bytes_never_raise_anything_else(encoded_image: Encode, data: st.DataObject, fmt: str) -> None:
    damaged = bytearray(encoded_image(16, 16, fmt))
    for place in data.draw(st.lists(st.integers(0, len(damaged) - 1), min_size=1, max_size=8)):
        damaged[place] = data.draw(st.integers(0, 255))
    try:
        assert decode_image(bytes(damaged), 4096).mode == "RGB"
    except BadSample as error:
        assert error.reason in (RejectReason.CORRUPT_IMAGE, RejectReason.DECOMPRESSION_BOMB)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("size", [(40, 30), (10_000, 10_000), (30_000, 30_000)])
def test_bombs_are_refused_by_their_header(size: tuple[int, int]) -> None:
    data = png_header(*size)
    for read in (image_size, decode_image):
        with pytest.raises(BadSample) as caught:
            read(data, 1000)
        assert caught.value.reason is RejectReason.DECOMPRESSION_BOMB


def test_the_bomb_says_both_numbers() -> None:
    with pytest.raises(BadSample, match=r"40 x 30 = 1200 pixels .*max_image_pixels \(1199\)"):
        image_size(png_header(40, 30), 1199)
    assert image_size(png_header(40, 30), 1200) == (40, 30)


def test_a_limit_above_pillows_own_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert image_size(png_header(40, 30), 1200) == (40, 30)
    assert image_size(png_header(40, 30), 5000) == (40, 30)
    assert Image.MAX_IMAGE_PIXELS == 5000
    with pytest.raises(BadSample):
        image_size(png_header(40, 30), 50)
    assert Image.MAX_IMAGE_PIXELS == 5000
