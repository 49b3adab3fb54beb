"""Files of a run: private (only their owner can read them), appended line by line, replaced atomically."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flowtrain.errors import CheckpointError

PRIVATE_FILE = 0o600
PRIVATE_DIRECTORY = 0o700
MAX_WAITING_NBYTES = 64 << 20
"""Lines that memory holds while they cannot be written."""
MAX_UNSYNCED_NBYTES = 1 << 20
"""Lines since the last sync are also in memory; more of them are synced."""


def open_private(path: Path, flags: int) -> int:
    """Open a file and return its descriptor; a new file is readable by its owner only."""
    return os.open(path, flags | os.O_CLOEXEC, PRIVATE_FILE)


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a kill at any moment leaves the old file or the complete new one."""
    replace_bytes(path, text.encode())
    sync_directory(path.parent)


def replace_bytes(path: Path, data: bytes) -> None:
    """As ``replace_text``, but only ``sync_directory`` makes the new name durable. An error leaves the old file."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with os.fdopen(open_private(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb", buffering=0) as file:
            write_at(file.fileno(), data, 0)
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()  # a full disk needs the room
        raise


def write_at(descriptor: int, data: bytes, offset: int) -> None:
    """Write all of ``data`` at ``offset``; a full disk can take a part of it and then raises OSError."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def sync_directory(path: Path) -> None:
    """Make renames in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class JsonLines:
    """A file with one JSON object per line; each line reaches the operating system before ``append`` returns.

    A line that cannot be written is kept, and written before the next one; what was written of it is cut off. So are
    all lines since the last ``sync`` if that fails, since the system may then have dropped them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open()

    def _open(self) -> None:
        self._descriptor = open_private(self._path, os.O_WRONLY | os.O_CREAT)
        self._is_open = True
        self._durable_nbytes = os.fstat(self._descriptor).st_size
        self._unsynced = bytearray()
        self._num_written = 0  # bytes of ``_unsynced`` that the operating system has
        self._is_torn = False

    @property
    def waiting_nbytes(self) -> int:
        """Bytes of lines that could not be written yet."""
        return len(self._unsynced) - self._num_written

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one line; ``record`` must not contain numbers that are not finite, which JSON does not have.

        Raises OSError if the line, or one before it, cannot be written now.
        """
        self._unsynced += _line(record)
        self.flush()
        if len(self._unsynced) > MAX_UNSYNCED_NBYTES:
            self.sync()

    def flush(self) -> None:
        """Write the lines that could not be written before; raises OSError if they still cannot."""
        end = self._durable_nbytes + self._num_written
        try:
            if self._is_torn:
                os.ftruncate(self._descriptor, end)
                self._is_torn = False
            write_at(self._descriptor, bytes(self._unsynced[self._num_written :]), end)
        except OSError:
            self._is_torn = True
            with suppress(OSError):
                os.ftruncate(self._descriptor, end)  # for readers; it is repeated before the next write
            raise
        self._num_written = len(self._unsynced)

    def sync(self) -> None:
        """Make the appended lines survive a power cut; raises OSError if they cannot be written now."""
        self.flush()
        try:
            os.fsync(self._descriptor)
        except OSError:
            self._num_written, self._is_torn = 0, True
            raise
        self._durable_nbytes += len(self._unsynced)
        self._unsynced.clear()
        self._num_written = 0

    def keep(self, wanted: Callable[[Mapping[str, Any]], bool]) -> None:
        """Rewrite the file with only the wanted records; an incomplete last line is dropped too."""
        kept = [record for record in read_json_lines(self._path) if wanted(record)]
        self.close()
        replace_bytes(self._path, b"".join(_line(record) for record in kept))
        sync_directory(self._path.parent)
        self._open()

    def close(self) -> None:
        """Close the file; idempotent. Lines that could not be written are lost."""
        if self._is_open:
            self._is_open = False
            os.close(self._descriptor)


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a file in order, without a last line that a kill left incomplete.

    Raises CheckpointError for any other line that is not a JSON object.
    """
    lines = path.read_bytes().split(b"\n")
    torn = lines.pop()  # empty for a complete file: every record ends with a newline
    for number, line in enumerate(lines, start=1):
        record = _record(line)
        if record is None:
            raise CheckpointError(f"{path}, line {number}: not a JSON object ({line[:60]!r}); cut the file before it")
        yield record
    if (record := _record(torn)) is not None:
        yield record


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False, ensure_ascii=False).encode() + b"\n"


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
