"""The files that audit a run, on a disk that may be full: metrics, ledger, quarantine, samples of skipped steps."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from flowtrain.controller.prepare import RunSpec
from flowtrain.errors import RunFileError
from flowtrain.flow.consumed import ConsumedPositions
from flowtrain.flow.units import eval_position_after
from flowtrain.observability.files import read_json_lines
from flowtrain.observability.ledger import LedgerRow, LedgerState, LedgerWriter
from flowtrain.observability.metrics import MetricsWriter, read_metrics
from flowtrain.observability.quarantine import QuarantineWriter
from flowtrain.observability.run_dir import RunDir
from flowtrain.observability.skipped import SkippedWriter
from flowtrain.types.events import LedgerRow as RowMessage
from flowtrain.types.events import UnitDone
from flowtrain.types.metrics import finite
from flowtrain.types.run_events import RunEvent, StepFinished
from flowtrain.types.samples import EVAL_POSITION_BASE, Rejection

logger = logging.getLogger(__name__)

MAX_BUFFERED_ROWS = 1 << 16
"""Rows of the ledger kept in memory between checkpoints; more rows are written earlier."""


class AuditWriter(Protocol):
    """A file whose lines wait in memory while they cannot be written."""

    @property
    def path(self) -> Path:
        """The file, or the directory of files."""

    @property
    def waiting_nbytes(self) -> int:
        """Bytes that the waiting lines take in the file."""

    @property
    def holds_too_much(self) -> bool:
        """Whether more lines wait than memory should hold."""


class AuditFiles:
    """Writes the audit's files. A write that fails does not end training, but no checkpoint becomes complete then.

    note: shows a line to the user, once when a file fails and once when it is written again.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._failed: dict[Path, OSError] = {}

    def attempt(self, writer: AuditWriter, write: Callable[..., object], *args: Any) -> None:
        """Call ``write`` of a writer, which keeps in memory what it cannot write.

        Raises RunFileError if the writer then holds too much.
        """
        try:
            write(*args)
        except OSError as error:
            if writer.path not in self._failed:
                self._note(
                    f"{writer.path} cannot be written ({error.strerror or error}); training goes on and its lines wait "
                    "in memory, but no checkpoint becomes complete until they are written: make room on the disk"
                )
            self._failed[writer.path] = error
            if writer.holds_too_much:
                raise self._error(writer, error) from error
            return
        if self._failed.pop(writer.path, None) is not None:
            self._note(f"{writer.path} is written again")

    def check_written(self, *writers: AuditWriter) -> None:
        """Raise RunFileError if the last write of one of these failed."""
        for writer in writers:
            if (error := self._failed.get(writer.path)) is not None:
                raise self._error(writer, error) from error

    def close(self, writer: AuditWriter, close: Callable[[], object]) -> None:
        """Close a writer, and log which lines are lost."""
        try:
            close()
        except OSError as error:
            logger.warning("%s could not be closed: %s", writer.path, error)
        if writer.path in self._failed:
            logger.warning("%s lacks its last lines, %d bytes", writer.path, writer.waiting_nbytes)

    def _error(self, writer: AuditWriter, error: OSError) -> RunFileError:
        return RunFileError(
            f"{writer.path} cannot be written: {error.strerror or error}; {writer.waiting_nbytes} bytes wait to be "
            f"written, {shutil.disk_usage(writer.path.parent).free} bytes are free on its disk; make room there"
        )


class AuditTrail:
    """Metrics, ledger, quarantine and skipped samples of one run. A resume cuts them back to its step.

    first_step, consumed: steps done before this start, and their positions. note: as of ``AuditFiles``.
    """

    def __init__(
        self,
        run_spec: RunSpec,
        files: RunDir,
        first_step: int,
        consumed: ConsumedPositions,
        note: Callable[[str], None],
    ) -> None:
        self._run_spec = run_spec
        self._metrics_path, self._quarantine_path = files.metrics, files.quarantine
        self._source_names = (*run_spec.source_names, *run_spec.config.data.eval_names)
        self._metrics = MetricsWriter(files.metrics)
        self._ledger = LedgerWriter(files.ledger)
        self._quarantine = QuarantineWriter(files.quarantine, self._source_names, run_spec.indexes)
        self._skipped = SkippedWriter(files.skipped)
        self._files = AuditFiles(note)
        self.cut_after(first_step, consumed)

    def cut_after(self, step: int, consumed: ConsumedPositions) -> None:
        """Drop the lines of later steps, which are done again. consumed: positions up to ``step``."""
        self._num_buffered_rows = 0
        self._metrics.truncate_after(step)
        self._ledger.truncate_after(step)
        self._skipped.truncate_after(step)
        first_eval = eval_position_after(self._run_spec.evaluations, step)
        self.num_rejected = self._quarantine.keep(
            lambda position: position in consumed if position < EVAL_POSITION_BASE else position < first_eval
        )
        """Training samples that the steps up to there rejected."""
        self.num_skipped = sum(record.get("skipped", False) for record in read_metrics(self._metrics_path))
        """Steps up to there that were skipped."""
        self._known_eval_rows = {
            (record["source"], record["row"])
            for record in read_json_lines(self._quarantine_path)
            if record["position"] >= EVAL_POSITION_BASE
        }

    def take(self, event: RunEvent) -> None:
        """Write a step's line. Raises RunFileError if too many lines wait for room on the disk; so do others below."""
        if isinstance(event, StepFinished):
            self._files.attempt(self._metrics, self._metrics.write, event.metrics)

    def add(self, rows: Sequence[RowMessage]) -> None:
        """Add positions that ended to the ledger."""
        self._ledger.append([self._ledger_row(row) for row in rows])
        self._num_buffered_rows += len(rows)
        if self._num_buffered_rows >= MAX_BUFFERED_ROWS:
            self._flush_ledger()

    def skip(self, done: UnitDone) -> None:
        """List the samples of a training step that made no update."""
        reason = "spike" if done.reports[0].is_spike else "not finite"
        # Means over tokens: sums would single out the longest answer.
        losses = {
            each.position: each.loss / max(each.weight, 1) for report in done.reports for each in report.sample_losses
        }
        samples = [
            {
                "step": row.step,
                "reason": reason,
                "position": row.position,
                "source": self._source_names[row.source],
                "row": row.row,
                "epoch": row.epoch,
                "dp_rank": row.dp_rank,
                "microbatch": row.slot,
                "loss": finite(losses.get(row.position)),
                "is_finite": None if row.position not in losses else math.isfinite(losses[row.position]),
            }
            for row in done.ledger
            if row.state == LedgerState.CONSUMED.value
        ]
        self._files.attempt(self._skipped, self._skipped.write, samples)

    def quarantine(self, rejection: Rejection) -> bool:
        """Write a rejected sample; returns False for one of an evaluation that an earlier round has rejected too."""
        if rejection.ref.position >= EVAL_POSITION_BASE:
            place = self.source_of(rejection), rejection.ref.row
            if place in self._known_eval_rows:
                return False
            self._known_eval_rows.add(place)
        self._files.attempt(self._quarantine, self._quarantine.write, rejection)
        return True

    def source_of(self, rejection: Rejection) -> str:
        """Return the name of a rejected sample's source, as the quarantine has it."""
        return self._source_names[rejection.ref.source]

    def flush(self) -> None:
        """Make all files durable. Raises RunFileError if one cannot be written now; its lines then stay in memory."""
        self._flush_ledger()
        self._files.attempt(self._metrics, self._metrics.sync)
        self._files.attempt(self._quarantine, self._quarantine.sync)
        self._files.attempt(self._skipped, self._skipped.sync)
        self._files.check_written(self._ledger, self._metrics, self._quarantine, self._skipped)

    def close(self) -> None:
        """Close the files; ledger rows after the last flush are dropped. Errors are logged."""
        for writer in (self._metrics, self._quarantine, self._skipped):
            self._files.close(writer, writer.close)

    def _flush_ledger(self) -> None:
        self._num_buffered_rows = 0
        self._files.attempt(self._ledger, self._ledger.flush)

    def _ledger_row(self, row: RowMessage) -> LedgerRow:
        return LedgerRow(
            position=row.position,
            source=self._source_names[row.source],
            row=row.row,
            epoch=row.epoch,
            step=row.step,
            dp_rank=row.dp_rank if row.dp_rank >= 0 else None,
            microbatch=row.slot if row.slot >= 0 else None,
            state=LedgerState(row.state),
        )
