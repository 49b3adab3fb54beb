"""Pixel values have the bits of HF's own processors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import (
    BaseImageProcessor,
    BitImageProcessorPil,
    CLIPImageProcessorPil,
    SiglipImageProcessorPil,
    ViTImageProcessorPil,
)

from flowtrain.models import image_processing
from flowtrain.models.image_processing import pixel_values

CLASSES = [CLIPImageProcessorPil, SiglipImageProcessorPil, BitImageProcessorPil, ViTImageProcessorPil]
SMALL: dict[str, Any] = {"size": {"height": 28, "width": 42}, "crop_size": {"height": 28, "width": 42}}


def plain(processor: BaseImageProcessor, image: Image.Image) -> np.ndarray:
    return np.asarray(processor(images=image.convert("RGB"), return_tensors="np")["pixel_values"][0])


@pytest.mark.parametrize("processor_class", CLASSES)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        SMALL,
        {"do_resize": False, "do_center_crop": False},
        {"do_resize": False, "do_center_crop": True, "crop_size": {"height": 90, "width": 90}},
        {"do_resize": False, "do_center_crop": False, "do_normalize": False},
        {"do_resize": False, "do_center_crop": False, "do_rescale": False, "do_normalize": False},
        {"do_resize": False, "do_center_crop": False, "do_pad": True, "pad_size": {"height": 99, "width": 99}},
        {"do_resize": False, "do_center_crop": False, "image_mean": [0.1, 0.2, 0.7], "image_std": [0.3, 1.0, 2.5]},
    ],
)
def test_bits_are_the_processors_own(processor_class: Any, settings: dict[str, Any], noise: Any) -> None:
    processor = processor_class(**settings)
    for number, (width, height) in enumerate([(50, 20), (13, 61), (1, 1), (90, 90)]):
        image = noise(width, height, number)
        found, expected = pixel_values(processor, image), plain(processor, image)
        assert found.dtype == np.float32 and found.flags.c_contiguous and found.flags.writeable
        assert np.array_equal(found, expected)


@given(st.floats(0.001, 1.0), st.lists(st.floats(-1.0, 1.0), min_size=3, max_size=3), st.floats(0.01, 5.0))
def test_bits_under_any_arithmetic(scale: float, mean: list[float], std: float) -> None:
    settings = {"rescale_factor": scale, "image_mean": mean, "image_std": [std, 2 * std, 0.3]}
    processor = SiglipImageProcessorPil(do_resize=False, **settings)
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (7, 9, 3), dtype=np.uint8))
    assert np.array_equal(pixel_values(processor, image), plain(processor, image))


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK"])
def test_other_modes_become_rgb(mode: str, noise: Any) -> None:
    processor, image = CLIPImageProcessorPil(**SMALL), noise(50, 20).convert(mode)
    assert np.array_equal(pixel_values(processor, image), plain(processor, image))


def test_most_processors_are_a_table(noise: Any) -> None:
    assert all(image_processing._value_table(each()) is not None for each in CLASSES)
    padding = SiglipImageProcessorPil(do_resize=False, do_pad=True, pad_size={"height": 99, "width": 99})
    assert image_processing._value_table(padding) is None, "padded pixels are zeros after the arithmetic"


def test_a_processor_that_looks_at_its_neighbours_is_no_table(noise: Any) -> None:
    class Contrast(SiglipImageProcessorPil):
        def normalize(self, image: np.ndarray, *args: Any, **kwargs: Any) -> np.ndarray:
            return np.asarray((image - image.mean()) / image.std(), np.float32)

    processor = Contrast(do_resize=False)
    assert image_processing._value_table(processor) is None
    assert np.array_equal(pixel_values(processor, noise(50, 20)), plain(processor, noise(50, 20)))
