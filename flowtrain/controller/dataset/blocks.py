"""What a run would make of the rows of a block: their sizes, and those that it would quarantine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from PIL import Image

from flowtrain.config.run import RunConfig
from flowtrain.data.images import pixels_of_sample
from flowtrain.data.rejections import rejected
from flowtrain.data.sizing import SizedResult, Sizer
from flowtrain.data.sources.base import Buffer, RawSample, Record
from flowtrain.data.sources.source_set import SourceSet
from flowtrain.errors import DataError
from flowtrain.models.families.registry import family_from_config
from flowtrain.types.samples import Rejection, SampleRef

ROW = np.dtype(
    [
        ("row", np.int64),
        ("tokens", np.int32),
        ("vision_tokens", np.int32),
        ("target_tokens", np.int32),
        ("images", np.int32),
        ("image_nbytes", np.int64),
        ("is_cut", np.bool_),
        ("content", np.uint64, 2),
    ]
)
"""What is known of a row that a run trains on. ``content``: a hash of its turns and encoded images."""


@dataclass(frozen=True, slots=True)
class BlockTask:
    """A block to look at."""

    source: int
    block: int
    num_rows: int
    """Its first rows that count; an evaluation may end within a block."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockFound:
    """What was found in a block."""

    task: BlockTask
    rows: npt.NDArray[np.void]
    """Of the type ``ROW``, in file order: the rows that a run trains on."""
    rejected: tuple[Rejection, ...] = ()
    """The rows that it would quarantine."""
    fault: str | None = None
    """Why the whole block cannot be read: its file is damaged, or gone."""


class RowChecker:
    """Looks at rows as feeders do, and with ``decode`` also as encoders do.

    Raises ConfigError if the tokenizer, its chat template or the image processor cannot be used.
    """

    def __init__(self, config: RunConfig, decode: bool) -> None:
        self._family = family_from_config(config)
        self._sizer = Sizer(self._family, self._family.tokenizer, config.data)
        self._encoder = self._family.encoder_names[0]
        self._max_pixels = config.data.max_image_pixels
        self._decode = decode

    def check(self, sources: SourceSet, task: BlockTask) -> BlockFound:
        """Read a block and look at its rows; raises SourceReadError if the storage does not answer."""
        source = sources.source(task.source)
        try:
            records = source.read_block(task.block)
        except DataError as error:
            return BlockFound(task, np.empty(0, ROW), fault=str(error))
        first = int(source.index.first_rows[task.block])
        rows, rejections = [], []
        for row, record in enumerate(records[: task.num_rows], start=first):
            found = self._row(SampleRef(row, task.source, row, 0), record)
            if isinstance(found, Rejection):
                rejections.append(found)
            else:
                rows.append(found)
        return BlockFound(task, np.array(rows, ROW), tuple(rejections))

    def _row(self, ref: SampleRef, record: Record) -> tuple[object, ...] | Rejection:
        try:
            raw = record.sample()
        except BaseException as error:
            return rejected(ref, error)
        loaded = self._sizer.load(ref, raw)
        if isinstance(loaded, Rejection):
            return loaded
        result = self._sizer.size(ref, loaded.measured)
        if isinstance(result, Rejection):
            return result
        if self._decode:
            paths = [None if image.path is None else str(image.path) for image in raw.images]
            pixels = pixels_of_sample(ref, loaded.images, self._max_pixels, self._preprocess, paths)
            if isinstance(pixels, Rejection):
                return replace(pixels, id=raw.id)
        return _sizes_of(result, raw, loaded.images)

    def _preprocess(self, image: Image.Image) -> np.ndarray:
        return self._family.preprocess(self._encoder, image)


def _sizes_of(result: SizedResult, raw: RawSample, images: Sequence[Buffer]) -> tuple[object, ...]:
    """Return the values of a ``ROW``."""
    sample = result.sample
    return (
        sample.ref.row,
        sample.num_tokens,
        sample.num_vision_tokens,
        sample.num_target_tokens,
        len(images),
        sum(len(image) for image in images),
        result.num_cut > 0,
        _content(raw, images),
    )


def _content(raw: RawSample, images: Sequence[Buffer]) -> tuple[int, int]:
    """Return a hash of turns and encoded images; each is hashed with its length, so that none can run into the next."""
    digest = hashlib.blake2b(digest_size=16)
    texts = (piece.encode("utf-8", "surrogatepass") for turn in raw.turns for piece in (turn.role, turn.text))
    for piece in (*texts, *images):
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    first, second = np.frombuffer(digest.digest(), np.uint64).tolist()
    return first, second
