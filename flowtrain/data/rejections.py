"""Which errors are a sample's own fault, and the rejections that they become.

Whatever is raised while one sample is turned into text, sizes or pixels belongs to that sample. This includes faults of
our own code: their type, message and line go into the quarantine, and ``data.max_rejected_fraction`` ends a run that
has too many. Only a lack of memory, and errors that FlowTrain raises on purpose (storage that does not answer), end the
run at once.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flowtrain.config.secrets import without_queries
from flowtrain.data.sources.base import BadSample
from flowtrain.data.sources.image_files import shown_path
from flowtrain.errors import FlowTrainError
from flowtrain.types.samples import Rejection, RejectReason, SampleRef

_MAX_DETAIL, _MAX_PATH, _MAX_PATH_IN_DETAIL, _MAX_ID = 1000, 1000, 300, 200
"""The most characters that a rejection keeps; all of them come from data."""


class BadImage(BadSample):
    """Raised for one image of a sample: ``number`` from 1."""

    def __init__(self, reason: RejectReason, detail: str, number: int, path: str | None = None) -> None:
        super().__init__(reason, detail, path)
        self.args = (reason, detail, number, path)
        self.number = number


def is_of_sample(error: BaseException) -> bool:
    """Return whether an error is a fault of the sample that was read, sized or decoded when it was raised."""
    if isinstance(error, BadSample):
        return True
    # The tokenizer's Rust code raises a panic, which is no Exception.
    is_ordinary = isinstance(error, Exception) or type(error).__name__ == "PanicException"
    return is_ordinary and not isinstance(error, MemoryError | FlowTrainError)


def rejected(ref: SampleRef, error: BaseException, sample_id: str | None = None) -> Rejection:
    """Return the rejection that an error of a sample becomes; raises the error itself if it must end the run.

    sample_id: the row's own id, if the data has one; None: what the error knows of it.
    """
    if not is_of_sample(error):
        raise error
    reason, detail = _reason_of(error, RejectReason.MALFORMED_SAMPLE)
    path = None
    if isinstance(error, BadSample):
        path, sample_id = error.path, error.sample_id if sample_id is None else sample_id
    return Rejection(
        ref,
        reason,
        _printable(without_queries(detail), _MAX_DETAIL),
        id=None if sample_id is None else _printable(str(sample_id), _MAX_ID),
        path=None if path is None else _printable(path, _MAX_PATH),
        image=error.number if isinstance(error, BadImage) else None,
    )


@contextmanager
def errors_of_image(number: int, count: int, path: str | None = None) -> Iterator[None]:
    """Turn what is raised for image ``number`` (from 1) of ``count`` into a BadImage that names it."""
    try:
        yield
    except BaseException as error:
        if not is_of_sample(error):
            raise
        reason, detail = _reason_of(error, RejectReason.CORRUPT_IMAGE)
        path = None if path is None else shown_path(path, _MAX_PATH + 1)
        where = "" if path is None else f" (path {_printable(path, _MAX_PATH_IN_DETAIL)!r})"
        raise BadImage(reason, f"image {number} of {count}{where}: {detail}", number, path) from error


def _reason_of(error: BaseException, unexpected: RejectReason) -> tuple[RejectReason, str]:
    if isinstance(error, BadSample):
        return error.reason, error.detail
    frames = traceback.extract_tb(error.__traceback__)
    place = f" (line {frames[-1].lineno} of {Path(frames[-1].filename).name})" if frames else ""
    return unexpected, f"{type(error).__name__}: {str(error)[:500]}{place}"


def _printable(text: str, limit: int) -> str:
    """Bound a text from data, and make sure that it can be written as UTF-8."""
    text = text[: limit + 1].encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
