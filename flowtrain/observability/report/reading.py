"""Reads files of a run that may be damaged, of another version, or still growing; what cannot be read is noted."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flowtrain.config.yaml_text import YamlError, parse_yaml

MAX_LINE_NBYTES = 8 << 20
"""A longer line is no record."""
TAIL_NBYTES = 1 << 20


class Notes:
    """What a reader of the page must know about the files: each text once, in order."""

    def __init__(self) -> None:
        self._texts: dict[str, None] = {}

    def add(self, text: str) -> None:
        """Add a text."""
        self._texts[text] = None

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts."""
        return tuple(self._texts)


def records(path: Path, notes: Notes, last_nbytes: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file, one a line; a missing file has none.

    Damaged lines are left out, with one note that counts them. A last line without its end is no damage: the run was
    killed while it wrote, or writes it now. last_nbytes: read only so much of the file's end.
    """
    try:
        with path.open("rb") as file:
            is_whole = True
            if last_nbytes is not None and (start := path.stat().st_size - last_nbytes) > 0:
                file.seek(start)
                file.readline()  # the rest of a line
                is_whole = False
            damaged: list[int] = []
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_NBYTES), b""), start=1):
                record = _record(line)
                if record is not None:
                    yield record
                elif line.endswith(b"\n") or len(line) >= MAX_LINE_NBYTES:
                    damaged.append(number)
    except FileNotFoundError:
        return
    except OSError as error:
        notes.add(f"{path.name} cannot be read: {error.strerror}")
        return
    if damaged:
        where = f"line {damaged[0]}" if is_whole else "a line"
        more = f" and {len(damaged) - 1:,} more" if len(damaged) > 1 else ""
        notes.add(f"{path.name}: {where}{more} cannot be read as JSON objects; they are left out")


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def yaml_mapping(path: Path, notes: Notes) -> Mapping[str, Any]:
    """Return a YAML file's mapping; an empty one if there is none, with a note if it cannot be read."""
    try:
        value, _ = parse_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, YamlError, RecursionError) as error:
        notes.add(f"{path.name} cannot be read: {error}")
        return {}
    if not isinstance(value, dict):
        notes.add(f"{path.name} cannot be read: it is no mapping of keys")
        return {}
    return value


def json_object(path: Path, notes: Notes) -> Mapping[str, Any]:
    """Return a JSON file's object; an empty one if there is none, with a note if it cannot be read."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        notes.add(f"{path.name} cannot be read: {error}")
        return {}
    return value if isinstance(value, dict) else {}


def dig(values: object, *keys: str) -> Any:
    """Return what lies at a path of keys; None if it is not there."""
    for key in keys:
        if not isinstance(values, Mapping):
            return None
        values = values.get(key)
    return values


def as_number(value: object) -> float:
    """Return a JSON number; NaN for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def as_count(value: object) -> int | None:
    """Return a JSON integer from 0 on; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else None


def as_text(value: object) -> str:
    """Return a text; an empty one for None."""
    return "" if value is None else str(value)


def as_list(value: object) -> list[Any]:
    """Return a list; an empty one for anything else."""
    return value if isinstance(value, list) else []
