"""Decoders of the encoder benchmark: from JPEG bytes to pixel values."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from _encoder_towers import VISION
from PIL import Image

from flowtrain.data.images import decode_image
from flowtrain.models.families.variable import VariableLlavaFamily
from flowtrain.models.image_processing import pixel_values

Decoder = Callable[[bytes], np.ndarray]
HF = "pil+hf"
"""The reference: Pillow decodes and resizes, the Hugging Face processor rescales and normalises."""


def photo(width: int, height: int, seed: int) -> bytes:
    """A JPEG with the spectrum of a photograph: noise of all scales, the weaker the finer."""
    rng = np.random.default_rng(seed)
    pixels = np.full((height, width, 3), 128.0, dtype=np.float32)
    cells = 2
    while cells < max(width, height):
        rows, columns = max(1, cells * height // max(width, height)), max(1, cells * width // max(width, height))
        noise = rng.standard_normal((rows, columns, 3)).astype(np.float32)
        for channel in range(3):
            layer = Image.fromarray(noise[..., channel]).resize((width, height), Image.Resampling.BICUBIC)
            pixels[..., channel] += 90.0 / np.sqrt(cells) * np.asarray(layer)
        cells *= 2
    buffer = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def decoders(family: VariableLlavaFamily) -> dict[str, Decoder]:
    """Ways from a JPEG to pixel values, the reference first; packages that are not installed are left out."""
    processor, bicubic = family.image_processor, Image.Resampling.BICUBIC

    def finish(image: Image.Image, size: tuple[int, int], **options: float) -> np.ndarray:
        return pixel_values(processor, image.resize(family.resized_size(*size), bicubic, **options))

    def hf(data: bytes) -> np.ndarray:
        resized = family.resize(decode_image(data))
        return np.asarray(processor(images=resized, return_tensors="np")["pixel_values"][0], np.float32)

    def draft(data: bytes) -> np.ndarray:
        image = Image.open(io.BytesIO(data))
        size = image.size
        image.draft("RGB", family.resized_size(*size))  # of 1, 1/2, 1/4, 1/8 the smallest that is large enough
        return finish(image.convert("RGB"), size)

    def gap(data: bytes) -> np.ndarray:
        image = decode_image(data)
        return finish(image, image.size, reducing_gap=2.0)

    found: dict[str, Decoder] = {
        HF: hf,
        "ours": lambda data: family.preprocess(VISION, decode_image(data)),
        "draft": draft,
        "gap": gap,
    }
    with suppress(ImportError):
        import simplejpeg

        def by_simplejpeg(data: bytes) -> np.ndarray:
            image = Image.fromarray(simplejpeg.decode_jpeg(data, "RGB"))
            return finish(image, image.size)

        found["simplejpeg"] = by_simplejpeg
    with suppress(ImportError):
        import cv2

        cv2.setNumThreads(1)

        def by_opencv(data: bytes) -> np.ndarray:
            pixels = cv2.cvtColor(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)
            size = family.resized_size(pixels.shape[1], pixels.shape[0])
            return pixel_values(processor, Image.fromarray(cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)))

        found["opencv"] = by_opencv
    return found


@dataclass(frozen=True)
class Decoded:
    """What one decoder does. seconds: of all images, one value a round. steps: differences from the reference, in
    8-bit steps before normalising: the mean and the largest."""

    name: str
    seconds: list[float]
    steps: tuple[float, float]


def llava_std(family: VariableLlavaFamily) -> np.ndarray:
    """Deviation of each channel by which pixels were divided, to go with ``[C, H, W]``."""
    return np.asarray(family.image_processor.image_std, np.float32)[:, None, None]


def measure(
    ways: Mapping[str, Decoder],
    images: Sequence[bytes],
    rounds: int,
    std: np.ndarray,
    aligned: Callable[[str, np.ndarray], np.ndarray] = lambda name, pixels: pixels,
) -> Iterator[Decoded]:
    """Time all decoders in turn, in processor seconds of one thread.

    std: by which pixel values were divided. aligned: puts a decoder's pixels into the order of the reference's.
    """
    expected = [ways[HF](data) for data in images]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        names = list(ways)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            started = time.thread_time()
            for data in images:
                ways[name](data)
            seconds[name].append(time.thread_time() - started)
    for name, way in ways.items():
        gaps = [
            255 * std * abs(aligned(name, way(data)) - wanted) for data, wanted in zip(images, expected, strict=True)
        ]
        mean = float(np.mean([gap.mean() for gap in gaps]))
        yield Decoded(name, seconds[name], (mean, float(max(gap.max() for gap in gaps))))
