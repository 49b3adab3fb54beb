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
from flowtrain.observability.report.run_data import PLANNING, Record
from flowtrain.observability.run_dir import RunDir, run_dir

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
        self.planning: Mapping[str, Any] | None = None
        """What ``mode: auto`` predicted (``planning.json``); None: no plan was made."""

    def write(self) -> None:
        """Write the prediction and the report, if the run has a directory of its own; errors are only logged."""
        run, settings = run_dir(self._config), self._config.observability
        if not run.config.is_file() or not run.metrics.is_file() or run.is_held():
            return
        try:
            if self.planning is not None:
                replace_text(run.root / PLANNING, json.dumps(self.planning, default=str))
            if settings.report:
                write_report([run.root], None, thumbnails=settings.report_thumbnails)
        except Exception as error:  # the run is over, and its outcome counts more than this page
            logger.warning("%s is missing: %s; flowtrain report %s writes it", run.report.name, error, run.root)


@contextmanager
def report_at_end(config: RunConfig) -> Iterator[Ending]:
    """Write a run's report once it is over, also if it failed; a second Ctrl-C ends it without one."""
    ending = Ending(config)
    try:
        yield ending
    except Exception:
        ending.write()
        raise
    else:
        ending.write()
