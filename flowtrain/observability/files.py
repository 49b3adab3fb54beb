"""Files of a run: private (only their owner can read them), appended line by line, replaced atomically."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flowtrain.errors import CheckpointError

PRIVATE_FILE = 0o600
PRIVATE_DIRECTORY = 0o700


def open_private(path: Path, flags: int) -> int:
    """Open a file and return its descriptor; a new file is readable by its owner only."""
    return os.open(path, flags | os.O_CLOEXEC, PRIVATE_FILE)


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a kill at any moment leaves the old file or the complete new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with os.fdopen(open_private(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class JsonLines:
    """A file with one JSON object per line; each line reaches the operating system before ``append`` returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        descriptor = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._file = os.fdopen(descriptor, "w", encoding="utf-8")

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one line; ``record`` must not contain numbers that are not finite, which JSON does not have."""
        self._file.write(_line(record))
        self._file.flush()

    def keep(self, wanted: Callable[[Mapping[str, Any]], bool]) -> None:
        """Rewrite the file with only the wanted records; an incomplete last line is dropped too."""
        kept = [record for record in read_json_lines(self._path) if wanted(record)]
        self._file.close()
        replace_text(self._path, "".join(_line(record) for record in kept))
        self._file = os.fdopen(open_private(self._path, os.O_WRONLY | os.O_APPEND), "w", encoding="utf-8")

    def sync(self) -> None:
        """Make the appended lines survive a power cut."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a file in order, without a last line that a kill left incomplete.

    Raises CheckpointError for any other line that is not a JSON object.
    """
    lines = path.read_bytes().split(b"\n")
    torn = lines.pop()  # empty for a complete file: every record ends with a newline
    for number, line in enumerate(lines, start=1):
        record = _record(line)
        if record is None:
            raise CheckpointError(f"{path}, line {number}: not a JSON object ({line[:60]!r}); move the file away")
        yield record
    if (record := _record(torn)) is not None:
        yield record


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, allow_nan=False, ensure_ascii=False) + "\n"


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
