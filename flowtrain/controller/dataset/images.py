"""Single images as encoders get them: decoded, and in the pixels of the tower."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from transformers import BaseImageProcessor

from flowtrain.config.data import DataConfig
from flowtrain.data.images import decode_image, tiles_of
from flowtrain.data.rejections import errors_of_image, rejected
from flowtrain.data.sources.base import RawImage
from flowtrain.errors import ConfigError
from flowtrain.models.families.base import Family
from flowtrain.models.image_processing import setting
from flowtrain.types.samples import Rejection, SampleRef


@dataclass(frozen=True, slots=True)
class ShownImage:
    """An image as it was found; fields are None as far as it cannot be read."""

    path: str | None
    """Its file, if it is one of its own."""
    nbytes: int | None = None
    """Encoded."""
    format: str | None = None
    mode: str | None = None
    """Pillow's mode, as stored."""
    size: tuple[int, int] | None = None
    """(width, height) in pixels."""
    num_tokens: int | None = None
    tower_shape: tuple[int, ...] | None = None
    """Of the pixel values that the tower gets, ``[C, H, W]``; of an image in tiles, ``[T, C, H, W]``."""
    rejection: Rejection | None = None
    """Why it cannot be used."""
    files: tuple[str, ...] = ()
    """Where it was saved: as decoded, and as the tower gets it."""

    def as_record(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
        return {**asdict(self), "rejection": None if self.rejection is None else self.rejection.detail}


class ImageViewer:
    """Looks at images one by one; saves them if there is a directory for it. Raises ConfigError if it cannot."""

    def __init__(self, family: Family, config: DataConfig, directory: Path | None) -> None:
        self._family = family
        self._encoder = family.encoder_names[0]
        self._config = config
        self._directory = directory
        if directory is not None:
            with _write_errors(directory):
                directory.mkdir(parents=True, exist_ok=True)

    def look(self, ref: SampleRef, images: Sequence[RawImage], stem: str) -> list[ShownImage]:
        """Decode a sample's images as an encoder does; stem: how the files' names begin. Raises SourceReadError."""
        return [
            self._look(ref, image, number, len(images), f"{stem}-image-{number}")
            for number, image in enumerate(images, start=1)
        ]

    def _look(self, ref: SampleRef, image: RawImage, number: int, count: int, name: str) -> ShownImage:
        path = None if image.path is None else str(image.path)
        shown = ShownImage(path)
        try:
            with errors_of_image(number, count, path):
                data = bytes(image.read(self._config.max_image_nbytes))
                shown = replace(shown, nbytes=len(data))
                decoded = decode_image(data, self._config.max_image_pixels)
                layout = self._family.image_layout(self._encoder, *decoded.size)
                pixels = self._family.preprocess(self._encoder, decoded)
        except BaseException as error:
            return replace(shown, rejection=rejected(ref, error))
        with Image.open(io.BytesIO(data)) as stored:
            shown = replace(shown, format=stored.format, mode=stored.mode, size=stored.size)
        files = () if self._directory is None else self._save(self._directory, name, decoded, pixels)
        return replace(shown, num_tokens=layout.num_tokens, tower_shape=pixels.shape, files=files)

    def _save(
        self, directory: Path, name: str, decoded: Image.Image, pixels: npt.NDArray[np.float32]
    ) -> tuple[str, ...]:
        processor = getattr(self._family, "image_processor", None)
        seen = Image.fromarray(_visible(pixels, processor))
        files = directory / f"{name}-decoded.png", directory / f"{name}-tower.png"
        with _write_errors(directory):
            for picture, file in zip((decoded, seen), files, strict=True):
                picture.save(file)
        return tuple(str(file) for file in files)


@contextmanager
def _write_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--save-images {directory}: cannot be written: {error.strerror or error}") from error


def _visible(pixels: npt.NDArray[np.float32], processor: BaseImageProcessor | None) -> npt.NDArray[np.uint8]:
    """Return an image's pixel values as a picture ``[H, W, C]``: what the processor's last steps did is undone.

    Tiles are side by side.
    """
    pixels = np.concatenate(tiles_of(pixels), axis=2)
    picture = pixels.transpose(1, 2, 0).astype(np.float64)
    if processor is not None and setting(processor, "do_normalize"):
        picture = picture * setting(processor, "image_std") + setting(processor, "image_mean")
    if processor is not None and setting(processor, "do_rescale"):
        picture = picture / setting(processor, "rescale_factor")
    return np.clip(picture.round(), 0, 255).astype(np.uint8)
