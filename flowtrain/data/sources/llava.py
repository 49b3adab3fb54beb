"""LLaVA's JSON and JSONL: ``image`` or ``images``, and ``conversations`` of ``{from, value}``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from flowtrain.data.sources.base import BadSample, RawImage, RawSample, Role, Turn, normalise, read_with_retries
from flowtrain.errors import DataError
from flowtrain.types.samples import RejectReason

_ROLES: dict[str, Role] = {"system": "system", "human": "user", "gpt": "assistant"}


class LlavaSource:
    """A LLaVA file; relative image paths start from ``image_root`` (default: the file's directory).

    A JSON array is held in memory; for JSONL only the offsets of the lines are (8 bytes per row).
    """

    def __init__(self, path: Path, name: str, image_root: Path | None = None) -> None:
        self.name = name
        self._image_root = path.parent if image_root is None else image_root
        self._records = _open_records(path)

    def __len__(self) -> int:
        return len(self._records)

    def read(self, row: int) -> RawSample:
        """Return a row; raises BadSample, or SourceReadError."""
        record = self._records.record(row)
        if not isinstance(record, dict):
            raise _malformed(f"expected an object, found {type(record).__name__}")
        images = [RawImage(path=self._image_root / path) for path in _image_paths(record)]
        return normalise(images, _turns(record))


def _malformed(detail: str) -> BadSample:
    return BadSample(RejectReason.MALFORMED_SAMPLE, detail)


def _image_paths(record: dict[str, Any]) -> list[str]:
    given = [key for key in ("image", "images") if record.get(key) not in (None, "", [])]
    if not given:
        return []
    if len(given) == 2:
        raise _malformed("both image and images are given; keep one")
    value = record[given[0]]
    paths = [value] if isinstance(value, str) else value
    if not isinstance(paths, list) or not all(isinstance(path, str) and path for path in paths):
        raise _malformed(f"{given[0]}: expected a path or a list of paths, found {str(value)[:80]!r}")
    return paths


def _turns(record: dict[str, Any]) -> list[Turn]:
    conversations = record.get("conversations")
    if not isinstance(conversations, list) or not conversations:
        raise _malformed(f"conversations: expected a list of turns, found {type(conversations).__name__}")
    turns = []
    for index, turn in enumerate(conversations):
        if not isinstance(turn, dict):
            raise _malformed(f"conversations[{index}]: expected an object, found {type(turn).__name__}")
        speaker, value = turn.get("from"), turn.get("value")
        role = _ROLES.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            raise _malformed(f"conversations[{index}].from: expected {', '.join(_ROLES)}, found {speaker!r}")
        if not isinstance(value, str):
            raise _malformed(f"conversations[{index}].value: expected a string, found {type(value).__name__}")
        turns.append(Turn(role, value))
    return turns


class _Records(Protocol):
    def __len__(self) -> int: ...

    def record(self, row: int) -> object: ...


class _JsonArray:
    def __init__(self, path: Path) -> None:
        try:
            records = json.loads(read_with_retries(path.read_bytes, f"data file {path}"))
        except ValueError as error:
            raise DataError(f"{path}: not valid JSON ({error}); expected an array of samples") from error
        assert isinstance(records, list), "the file starts with a bracket"
        self._records: list[object] = records

    def __len__(self) -> int:
        return len(self._records)

    def record(self, row: int) -> object:
        return self._records[row]


class _JsonLines:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets = read_with_retries(lambda: _line_offsets(path), f"data file {path}")

    def __len__(self) -> int:
        return len(self._offsets)

    def record(self, row: int) -> object:
        line = read_with_retries(lambda: self._line(row), f"row {row} of {self._path}")
        try:
            record: object = json.loads(line)
        except ValueError as error:
            raise _malformed(f"not valid JSON in the line at byte {self._offsets[row]}: {error}") from error
        return record

    def _line(self, row: int) -> bytes:
        # Opened for each read, so that threads share no file offset and processes share no descriptor.
        with self._path.open("rb") as file:
            file.seek(int(self._offsets[row]))
            return file.readline()


def _line_offsets(path: Path) -> np.ndarray:
    """Return the byte offset of each line that is not blank, int64 ``[num_rows]``."""
    offsets, position = [], 0
    with path.open("rb") as file:
        for line in file:
            if not line.isspace():
                offsets.append(position)
            position += len(line)
    return np.array(offsets, dtype=np.int64)


def _open_records(path: Path) -> _Records:
    first = read_with_retries(lambda: _first_character(path), f"data file {path}")
    if first == b"[":
        return _JsonArray(path)
    if first == b"{":
        return _JsonLines(path)
    raise DataError(f"{path}: expected a JSON array or JSON lines of samples, found {first!r} at the start")


def _first_character(path: Path) -> bytes:
    with path.open("rb") as file:
        while (character := file.read(1)).isspace():
            pass
    return character
