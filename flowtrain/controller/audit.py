"""The files that audit a run, on a disk that may be full: metrics, ledger, quarantine."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from flowtrain.errors import RunFileError

logger = logging.getLogger(__name__)


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
