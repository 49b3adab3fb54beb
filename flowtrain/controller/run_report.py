"""Writes ``report.html``: when a user asks for it, and at the end of a run. No Ray, no torch."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flowtrain.config.home import expanded
from flowtrain.config.run import RunConfig
from flowtrain.errors import ConfigError
from flowtrain.observability.files import replace_text
from flowtrain.observability.report.build import ReportOptions, build_report
from flowtrain.observability.report.outcome import resume_text
from flowtrain.observability.report.run_data import PLANNING, Record
from flowtrain.observability.report.status import status_of
from flowtrain.observability.run_dir import RunDir, run_dir
from flowtrain.training import checkpoint_store

logger = logging.getLogger(__name__)

COMPARISON = "comparison.html"


def write_report(
    roots: Sequence[Path], output: Path | None, steps: tuple[int, int] | None = None, thumbnails: bool = True
) -> Path:
    """Write the page of a run, or of several side by side, and return its path.

    output: the file; None: ``report.html`` in the run's directory, or ``comparison.html`` in this one.
    Raises ConfigError for what is no run, and if the file cannot be written.
    """
    options = ReportOptions(steps, thumbnails, _ImageReader() if thumbnails else None)
    text = build_report(roots, options)
    file = output
    if file is None:
        file = RunDir(expanded(roots[0])).report if len(roots) == 1 else Path(COMPARISON)
    file = expanded(file).absolute()
    try:
        replace_text(file, text)
    except OSError as error:
        raise ConfigError(f"{file}: the report cannot be written: {error.strerror}; choose another --output") from error
    return file


class _ImageReader:
    """Opens the data room's reader with the first image, since most runs reject nothing."""

    def __init__(self) -> None:
        self._reader: Any = None

    def __call__(self, config: Mapping[str, Any], record: Record) -> bytes | None:
        if self._reader is None:
            from flowtrain.data.quarantined import QuarantinedImages

            self._reader = QuarantinedImages()
        found: bytes | None = self._reader.image_of(config, record)
        return found


class Ending:
    """What the end of a run writes beside its other files."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._earlier = self._opening
        self.planning: Mapping[str, Any] | None = None
        """What ``mode: auto`` predicted (``planning.json``); None: no plan was made."""

    def write(self) -> Path | None:
        """Write the prediction and the report, if the run has a directory of its own; errors are only logged.

        Returns the report; None if none was written.
        """
        run, settings = self._run, self._config.observability
        if not self._has_run or not run.metrics.is_file():
            return None
        try:
            if self.planning is not None:
                replace_text(run.root / PLANNING, json.dumps(self.planning, default=str))
            if settings.report:
                return write_report([run.root], None, thumbnails=settings.report_thumbnails)
        except Exception as error:  # the run is over, and its outcome counts more than this page
            logger.warning("%s is missing: %s; flowtrain report %s writes it", run.report.name, error, run.root)
        return None

    def write_failed(self, error: Exception) -> None:
        """Write as ``write`` does, and add to an error where a user can read more about the run."""
        report = self.write()
        if not self._has_run or self._opening == self._earlier:  # what is there is of an earlier start
            return
        error.add_note(f"the report of the run: {report}" if report is not None else f"the run is in {self._run.root}")

    def note_interrupt(self, interrupt: KeyboardInterrupt) -> None:
        """Add to an interrupt what is lost, and how to get the report that was not waited for."""
        run = self._run
        try:
            if not self._has_run:
                return
            if self._config.emulation is None:  # such a run cannot be resumed
                last = checkpoint_store.latest_complete(run.checkpoints)
                saved = checkpoint_store.read_meta(last).step if last is not None else None
                interrupt.add_note(f"{run.root}: {resume_text(run, status_of(run.root).step, saved)}")
            if run.metrics.is_file():
                interrupt.add_note(f"flowtrain report {run.root} writes its report")
        except Exception as error:  # the interrupt itself counts more
            logger.warning("%s: what the interrupt has cost is not known: %s", run.root, error)

    @property
    def _run(self) -> RunDir:
        return run_dir(self._config)

    @property
    def _opening(self) -> tuple[int, int] | None:
        """Tells the starts that opened the directory apart: each replaces the plan; None: none has."""
        try:
            plan = self._run.plan.stat()
        except OSError:
            return None
        return plan.st_ino, plan.st_mtime_ns

    @property
    def _has_run(self) -> bool:
        """Whether the run has a directory in which no process trains."""
        return self._run.config.is_file() and not self._run.is_held()


@contextmanager
def report_at_end(config: RunConfig) -> Iterator[Ending]:
    """Write a run's report once it is over, also if it failed; a second Ctrl-C ends it without one.

    The exception gets notes that say where to read more, and after an interrupt what is lost.
    """
    ending = Ending(config)
    try:
        yield ending
    except KeyboardInterrupt as interrupt:
        ending.note_interrupt(interrupt)
        raise
    except Exception as error:
        ending.write_failed(error)
        raise
    else:
        ending.write()
