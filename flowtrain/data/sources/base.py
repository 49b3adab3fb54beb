"""The interface of data sources: raw images, turns, and the reason if a row cannot be used."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from flowtrain.errors import SourceReadError
from flowtrain.types.samples import RejectReason

IMAGE_PLACEHOLDER = "<image>"
"""Marks an image's place in a turn's text, independent of the tokenizer's image token."""

RETRY_DELAYS_S = (0.1, 0.5, 2.0)
"""Waits between attempts to read after an operating system error."""

Role = Literal["system", "user", "assistant"]

_T = TypeVar("_T")

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)
"""Errors that mean that the file does not exist; other errors mean that the storage does not answer."""


class BadSample(Exception):
    """Raised for a row that must be rejected: ``reason`` for the statistics, ``detail`` with the conflicting values."""

    def __init__(self, reason: RejectReason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason.value}: {self.detail}"


@dataclass(frozen=True, slots=True)
class RawImage:
    """An encoded image: its bytes, or the file that holds them (exactly one is given)."""

    data: bytes | memoryview | None = None
    path: Path | None = None

    def __post_init__(self) -> None:
        assert (self.data is None) != (self.path is None), "give either data or path"

    def read(self, max_nbytes: int | None = None) -> bytes | memoryview:
        """Return the encoded bytes.

        Raises BadSample (MISSING_IMAGE if there is no such file, OVERSIZED_SAMPLE if it is larger than ``max_nbytes``),
        SourceReadError if it cannot be read.
        """
        if self.data is not None:
            return self.data
        return read_with_retries(lambda: self._read_file(max_nbytes), f"image {self.path}")

    def _read_file(self, max_nbytes: int | None) -> bytes:
        assert self.path is not None
        try:
            data = self.path.read_bytes()
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
            if isinstance(error, OSError) and error.errno not in _ABSENT:
                raise
            raise BadSample(RejectReason.MISSING_IMAGE, f"no image file {str(self.path)[:200]!r}") from error
        if max_nbytes is not None and len(data) > max_nbytes:
            raise BadSample(
                RejectReason.OVERSIZED_SAMPLE, f"{len(data)} bytes are more than data.max_image_nbytes ({max_nbytes})"
            )
        return data


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
    """The row's own id, if the data has one."""


class Source(Protocol):
    """Raw samples by row, in any order; safe to read from several threads, opened once in each process."""

    @property
    def name(self) -> str:
        """The source's name in the quarantine file and the ledger."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def read(self, row: int) -> RawSample:
        """Return a row; raises BadSample if it must be rejected, SourceReadError if it cannot be read."""


def read_with_retries(read: Callable[[], _T], what: str) -> _T:
    """Call ``read``; retry a few times after an OSError, then raise a SourceReadError that names ``what``."""
    for delay_s in (*RETRY_DELAYS_S, None):
        try:
            return read()
        except OSError as error:
            if delay_s is None:
                attempts = len(RETRY_DELAYS_S) + 1
                raise SourceReadError(
                    f"cannot read {what} after {attempts} attempts: {error}; check the storage, then resume the run"
                ) from error
            time.sleep(delay_s)
    raise AssertionError("unreachable")


def normalise(images: Sequence[RawImage], turns: Sequence[Turn]) -> RawSample:
    """Give every image exactly one ``<image>`` in the turns.

    Without any placeholder (as in FineVision), all images go in front of the first user turn. Any other difference of
    the two counts raises BadSample (PLACEHOLDER_MISMATCH), which names both.
    """
    num_placeholders = sum(turn.text.count(IMAGE_PLACEHOLDER) for turn in turns)
    if num_placeholders == len(images):
        return RawSample(tuple(images), tuple(turns))
    if num_placeholders:
        raise BadSample(
            RejectReason.PLACEHOLDER_MISMATCH,
            f"{len(images)} images but {num_placeholders} {IMAGE_PLACEHOLDER} placeholders",
        )
    for index, turn in enumerate(turns):
        if turn.role == "user":
            text = f"{IMAGE_PLACEHOLDER * len(images)}\n{turn.text}"
            return RawSample(tuple(images), (*turns[:index], replace(turn, text=text), *turns[index + 1 :]))
    raise BadSample(
        RejectReason.PLACEHOLDER_MISMATCH,
        f"{len(images)} images but 0 {IMAGE_PLACEHOLDER} placeholders, and no user turn to put them in front of",
    )
