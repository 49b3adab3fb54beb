"""The interface of data sources: raw images, turns, records, and the blocks that they are read in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

from flowtrain.data.sources.bad_sample import BadSample
from flowtrain.data.sources.image_files import check_image_nbytes, path_beneath, read_image_file
from flowtrain.types.samples import RejectReason
from flowtrain.types.sources import SourceIndex

__all__ = [
    "IMAGE_PLACEHOLDER",
    "BadSample",
    "Buffer",
    "RawImage",
    "RawSample",
    "Record",
    "Role",
    "Source",
    "Turn",
    "image_beneath",
    "normalise",
]

IMAGE_PLACEHOLDER = "<image>"
"""Marks an image's place in a turn's text, independent of the tokenizer's image token."""

Buffer = bytes | memoryview
"""Encoded bytes."""

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class RawImage:
    """An encoded image: its bytes, or the path or URL of the file that holds them (exactly one is given)."""

    data: Buffer | None = None
    path: str | Path | None = None
    root: str | None = field(default=None, compare=False)
    """Where the path that the row gives starts from, for messages."""

    def __post_init__(self) -> None:
        assert (self.data is None) != (self.path is None), "give either data or path"

    @property
    def is_file(self) -> bool:
        """Whether the image is a file of its own."""
        return self.data is None

    def read(self, max_nbytes: int | None = None) -> Buffer:
        """Return the encoded bytes; never more than ``max_nbytes`` are read (None: no limit).

        Raises BadSample: MISSING_IMAGE if there is no such regular file, OVERSIZED_SAMPLE above ``max_nbytes``.
        Raises SourceReadError if the storage does not answer.
        """
        if self.data is None:
            return read_image_file(str(self.path), max_nbytes, self.root)
        check_image_nbytes(len(self.data), max_nbytes)
        return self.data


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation; ``<image>`` in its text stands for the sample's next image."""

    role: Role
    text: str


@dataclass(frozen=True, slots=True)
class RawSample:
    """A sample as in its source, with exactly one ``<image>`` in the turns for each image, in order."""

    images: tuple[RawImage, ...]
    turns: tuple[Turn, ...]
    id: str | None = None
    """The name that the data gives it, if any."""


class Record(Protocol):
    """One row of a block, not yet looked at."""

    def sample(self) -> RawSample:
        """Return the sample; raises BadSample for whatever is wrong with this row."""

    def stored_text(self) -> str:
        """Return what the row holds, for people: as far as it can be read, without the images' bytes. Never raises."""


class Source(Protocol):
    """Rows in blocks, each read at once; safe to read from several threads. It opens nothing until a block is read."""

    @property
    def name(self) -> str:
        """The source's name in the quarantine file and the ledger."""

    @property
    def index(self) -> SourceIndex:
        """Its files and blocks."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def read_block(self, block: int) -> Sequence[Record]:
        """Return all rows of a block in file order; raises SourceReadError, or DataError for a damaged file."""


def image_beneath(root: str, path: str, what: str) -> RawImage:
    """Return the image of a path in a row; raises BadSample as ``path_beneath``."""
    return RawImage(path=path_beneath(root, path, what), root=root)


def normalise(images: Sequence[RawImage], turns: Sequence[Turn], id: str | None = None) -> RawSample:
    """Give every image exactly one ``<image>`` in the turns.

    Without any placeholder (as in FineVision), all images go in front of the first user turn. Any other difference of
    the two counts raises BadSample (PLACEHOLDER_MISMATCH), which names both.
    """
    num_placeholders = sum(turn.text.count(IMAGE_PLACEHOLDER) for turn in turns)
    if num_placeholders == len(images):
        return RawSample(tuple(images), tuple(turns), id)
    if num_placeholders:
        raise BadSample(
            RejectReason.PLACEHOLDER_MISMATCH,
            f"{len(images)} images but {num_placeholders} {IMAGE_PLACEHOLDER} placeholders",
        )
    for index, turn in enumerate(turns):
        if turn.role == "user":
            text = f"{IMAGE_PLACEHOLDER * len(images)}\n{turn.text}"
            return RawSample(tuple(images), (*turns[:index], replace(turn, text=text), *turns[index + 1 :]), id)
    raise BadSample(
        RejectReason.PLACEHOLDER_MISMATCH,
        f"{len(images)} images but 0 {IMAGE_PLACEHOLDER} placeholders, and no user turn to put them in front of",
    )
