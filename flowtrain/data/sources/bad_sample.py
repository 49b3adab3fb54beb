"""The reason why one row cannot be used. It is a module of its own because reading image files raises it too."""

from __future__ import annotations

from flowtrain.types.samples import RejectReason


class BadSample(Exception):
    """Raised for a row that must be rejected: ``reason`` for the statistics, ``detail`` with the conflicting values."""

    def __init__(self, reason: RejectReason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason.value}: {self.detail}"


def malformed(detail: str) -> BadSample:
    """Return the BadSample of a row that has another shape than its format says."""
    return BadSample(RejectReason.MALFORMED_SAMPLE, detail)
