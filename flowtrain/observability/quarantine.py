"""``quarantine.jsonl``: one object per rejected sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowtrain.observability.files import MAX_WAITING_NBYTES, JsonLines
from flowtrain.types.samples import EVAL_POSITION_BASE, Rejection
from flowtrain.types.sources import SourceIndex

QUARANTINE_SCHEMA = 1


class QuarantineWriter:
    """Writes each rejected sample once: where it comes from, the reason, and a detail with the values.

    source_names, indexes: of the training sources, then of the held-out sets.
    """

    def __init__(self, path: Path, source_names: Sequence[str], indexes: Sequence[SourceIndex]) -> None:
        self.path = path
        self._lines = JsonLines(path)
        self._source_names = source_names
        self._indexes = indexes

    def write(self, rejection: Rejection) -> None:
        """Append a rejected sample; raises OSError if it cannot be written now. It is then written later."""
        ref = rejection.ref
        file, file_row = self._indexes[ref.source].place_of(ref.row)
        self._lines.append(
            {
                "schema": QUARANTINE_SCHEMA,
                "position": ref.position,
                "source": self._source_names[ref.source],
                "row": ref.row,
                "file": file,
                "file_row": file_row,
                "epoch": ref.epoch,
                "id": rejection.id,
                "reason": rejection.reason.value,
                "image": rejection.image,
                "path": rejection.path,
                "detail": rejection.detail,
            }
        )

    @property
    def holds_too_much(self) -> bool:
        """Whether more lines wait than memory should hold."""
        return self._lines.waiting_nbytes > MAX_WAITING_NBYTES

    @property
    def waiting_nbytes(self) -> int:
        """Bytes of lines that could not be written yet."""
        return self._lines.waiting_nbytes

    def keep(self, is_done: Callable[[int], bool]) -> int:
        """Drop the samples that a resumed run will size again; returns the number of training samples that stay.

        is_done: whether the run is past a position, of training or of an evaluation.
        """
        kept_training = 0

        def wanted(record: Mapping[str, Any]) -> bool:
            nonlocal kept_training
            keep = is_done(record["position"])
            kept_training += keep and record["position"] < EVAL_POSITION_BASE
            return keep

        self._lines.keep(wanted)
        return kept_training

    def sync(self) -> None:
        """Make the written lines survive a power cut; raises OSError if they cannot be written now."""
        self._lines.sync()

    def close(self) -> None:
        """Close the file; idempotent."""
        self._lines.close()
