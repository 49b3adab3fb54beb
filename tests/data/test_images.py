from __future__ import annotations

import io
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from flowtrain.data.images import decode_image, image_size, pixels_of_sample
from flowtrain.data.sources.base import BadSample
from flowtrain.types.samples import Rejection, RejectReason, SampleRef
from tests.data.mutations import png, tiff

Encode = Callable[..., bytes]


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
    data = png(*size)
    for read in (image_size, decode_image):
        with pytest.raises(BadSample) as caught:
            read(data, 1000)
        assert caught.value.reason is RejectReason.DECOMPRESSION_BOMB


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [10_000, 30_000])
def test_a_bomb_names_our_key_also_if_pillow_sees_it_first(side: int) -> None:
    with pytest.raises(BadSample, match=rf"{side**2} pixels are more than data.max_image_pixels \(1000\)"):
        image_size(png(side, side), 1000)


def test_the_bomb_says_both_numbers() -> None:
    with pytest.raises(BadSample, match=r"40 x 30 = 1200 pixels are .*max_image_pixels \(1199\)"):
        image_size(png(40, 30), 1199)
    assert image_size(png(40, 30), 1200) == (40, 30)


def test_a_limit_above_pillows_own_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert image_size(png(40, 30), 1200) == (40, 30)
    assert image_size(png(40, 30), 5000) == (40, 30)
    assert Image.MAX_IMAGE_PIXELS == 5000
    with pytest.raises(BadSample):
        image_size(png(40, 30), 50)
    assert Image.MAX_IMAGE_PIXELS == 5000


@pytest.mark.parametrize("fmt", ["PNG", "JPEG", "WEBP"])
def test_bytes_in_anothers_memory(encoded_image: Encode, fmt: str) -> None:
    data = encoded_image(13, 7, fmt)
    view = memoryview(bytearray(b"...." + data + b"...."))[4:-4]
    assert image_size(view) == (13, 7)
    assert decode_image(view).tobytes() == decode_image(data).tobytes()


@pytest.mark.parametrize(
    "data", [png(0, 5), png(5, 0), b"P6 0 5 255\n" + bytes(50), b"GIF89a" + struct.pack("<HH", 0, 5) + b"\0\0\0;"]
)
def test_an_image_of_no_pixels(data: bytes) -> None:
    for read in (image_size, decode_image):
        with pytest.raises(BadSample) as caught:
            read(data)
        assert caught.value.reason is RejectReason.CORRUPT_IMAGE


def test_an_image_that_is_decoded_in_another_size(encoded_image: Encode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "convert", lambda self, mode: Image.new(mode, (7, 13)))
    with pytest.raises(BadSample, match=r"\(13, 7\), but \(7, 13\)") as caught:
        decode_image(encoded_image(13, 7))
    assert caught.value.reason is RejectReason.CORRUPT_IMAGE


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize(
    "data",
    [
        png(8, 8, (b"zTXt", b"k\0\0" + zlib.compress(b"\0" * (1 << 28), 9))),
        png(8, 8, (b"iCCP", b"k\0\0" + zlib.compress(b"\0" * (1 << 28), 9))),
        tiff(5000, 1 << 20),
    ],
    ids=["text", "profile", "tags"],
)
def test_what_a_few_bytes_claim_to_hold_is_not_unpacked(data: bytes) -> None:
    tracemalloc.start()
    try:
        for read in (image_size, decode_image):
            with suppress(BadSample):
                read(data)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_pixels_of_a_sample(encoded_image: Encode) -> None:
    ref = SampleRef(5, 0, 3, 1)
    good = [encoded_image(8, 4), memoryview(encoded_image(4, 8, "JPEG"))]
    pixels = pixels_of_sample(ref, good, 100, np.asarray)
    assert not isinstance(pixels, Rejection)
    assert [each.shape for each in pixels] == [(4, 8, 3), (8, 4, 3)]
    truncated = encoded_image(64, 64)[:-60]
    rejection = pixels_of_sample(ref, [*good, truncated], 1 << 20, np.asarray)
    assert isinstance(rejection, Rejection)
    assert (rejection.ref, rejection.reason, rejection.image) == (ref, RejectReason.CORRUPT_IMAGE, 3)
    assert rejection.detail.startswith(f"image 3 of 3: {len(truncated)} bytes")


def test_a_preprocessing_that_fails(encoded_image: Encode) -> None:
    def fail(error: BaseException) -> Callable[[Image.Image], np.ndarray]:
        def preprocess(image: Image.Image) -> np.ndarray:
            raise error

        return preprocess

    ref, images = SampleRef(5, 0, 3, 1), [encoded_image()]
    rejection = pixels_of_sample(ref, images, 100, fail(ValueError("the sides differ")))
    assert isinstance(rejection, Rejection) and rejection.reason is RejectReason.CORRUPT_IMAGE
    assert "image 1 of 1: ValueError: the sides differ" in rejection.detail
    with pytest.raises(MemoryError):
        pixels_of_sample(ref, images, 100, fail(MemoryError()))
