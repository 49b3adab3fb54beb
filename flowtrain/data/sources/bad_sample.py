"""The reason why one row cannot be used. It is a module of its own because reading image files raises it too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flowtrain.types.samples import RejectReason


class BadSample(Exception):
    """Raised for a row that must be rejected: ``reason`` for the statistics, ``detail`` with the conflicting values.

    path: of the image that is at fault, if the row names it by one. sample_id: the row's own id, set once it is known.
    """

    def __init__(self, reason: RejectReason, detail: str, path: str | None = None) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail
        self.path = path
        self.sample_id: str | None = None

    def __str__(self) -> str:
        return f"{self.reason.value}: {self.detail}"


def malformed(detail: str) -> BadSample:
    """Return the BadSample of a row that has another shape than its format says."""
    return BadSample(RejectReason.MALFORMED_SAMPLE, detail)


@contextmanager
def errors_of_row(id: str | None) -> Iterator[None]:
    """Give the row's own id to a BadSample that is raised for it and has none yet."""
    try:
        yield
    except BadSample as error:
        if error.sample_id is None:
            error.sample_id = id
        raise
