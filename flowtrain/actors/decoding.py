"""A backbone rank reads and decodes the images of its microbatches (``mode: monolithic``)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from PIL import Image

from flowtrain.data.images import pixels_of_sample
from flowtrain.mempool.pool import Pool
from flowtrain.types.messages import MicrobatchLocation, PartLocation
from flowtrain.types.samples import IMAGES_PART, Rejection

ImageSizes = tuple[tuple[int, int], ...]
"""Height and width (pixels) of each image of a sample as it enters the tower."""


@dataclass(frozen=True)
class Decoded:
    """The images of a microbatch."""

    pixels: dict[int, list[np.ndarray]]
    """By position, in the order of the location: [C, H, W] of each image, float32."""
    rejections: tuple[Rejection, ...]
    """Samples with an image that cannot be decoded; ``pixels`` lacks them."""

    @property
    def sizes(self) -> tuple[ImageSizes, ...]:
        """As ``LocatedTexts.image_sizes``."""
        return tuple(tuple(array.shape[1:] for array in arrays) for arrays in self.pixels.values())


class ImageReader:
    """Reads encoded images from the pool and decodes them. Use it from one thread.

    preprocess: returns an image's pixel values, float32 [C, H, W].
    max_pixels: largest image that is decoded.
    num_threads: threads that decode at the same time.
    """

    def __init__(
        self, pool: Pool, preprocess: Callable[[Image.Image], np.ndarray], max_pixels: int, num_threads: int
    ) -> None:
        self._pool = pool
        self._preprocess = preprocess
        self._max_pixels = max_pixels
        self._num_threads = num_threads

    def read(self, location: MicrobatchLocation, leave_out: Collection[int] = ()) -> Decoded:
        """Return the images of a microbatch's samples without those of ``leave_out``. Raises as ``Pool.get``."""
        parts = [part for part in location.parts if part.part == IMAGES_PART and part.position not in leave_out]
        data = self._pool.get_batch([part.extents for part in parts])
        if self._num_threads > 1 and len(parts) > 1:
            with ThreadPoolExecutor(self._num_threads, thread_name_prefix="decode") as decoders:
                outcomes = list(decoders.map(self._decode, parts, data))
        else:
            outcomes = list(map(self._decode, parts, data))
        found = zip(parts, outcomes, strict=True)
        return Decoded(
            {part.position: outcome for part, outcome in found if not isinstance(outcome, Rejection)},
            tuple(outcome for outcome in outcomes if isinstance(outcome, Rejection)),
        )

    def _decode(self, part: PartLocation, data: np.ndarray) -> list[np.ndarray] | Rejection:
        assert part.ref is not None, "the flow names the sample of encoded images"
        encoded = [image.data for image in np.split(data, np.cumsum(part.pieces)[:-1])]
        return pixels_of_sample(part.ref, encoded, self._max_pixels, self._preprocess)
