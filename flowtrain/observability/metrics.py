"""``metrics.jsonl``: one object per training step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flowtrain.observability.files import MAX_WAITING_NBYTES, JsonLines, read_json_lines
from flowtrain.types.metrics import StepMetrics


class StepLines:
    """Lines that belong to steps; after a kill, a reader sees each line complete or not at all.

    A line that cannot be written is kept and written later, see ``JsonLines``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = JsonLines(path)

    @property
    def holds_too_much(self) -> bool:
        """Whether more lines wait than memory should hold."""
        return self._lines.waiting_nbytes > MAX_WAITING_NBYTES

    @property
    def waiting_nbytes(self) -> int:
        """Bytes of lines that could not be written yet."""
        return self._lines.waiting_nbytes

    def sync(self) -> None:
        """Make the written lines survive a power cut; raises OSError if they cannot be written now."""
        self._lines.sync()

    def truncate_after(self, step: int) -> None:
        """Drop the lines of later steps, before a run resumes from a checkpoint of ``step``."""
        self._lines.keep(lambda record: record["step"] <= step)

    def close(self) -> None:
        """Close the file; idempotent."""
        self._lines.close()


class MetricsWriter(StepLines):
    """Writes one line per step."""

    def write(self, metrics: StepMetrics) -> None:
        """Append a step; raises OSError if it cannot be written now."""
        self._lines.append(metrics.as_record())


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a ``metrics.jsonl`` in order, without an incomplete last line.

    Lines of earlier versions (``schema`` 1) lack the newest keys.
    """
    return read_json_lines(path)
