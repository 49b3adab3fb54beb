"""Files that a check writes while it goes on: sizes of samples, and rejected rows."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from flowtrain.controller.dataset.blocks import BlockFound
from flowtrain.controller.dataset.report import CHECK_SCHEMA, rejected_record
from flowtrain.data.lengths_file import TILES, TOKENS
from flowtrain.errors import ConfigError
from flowtrain.types.sources import SourceIndex

_SIZES = {
    TILES: "images",
    TOKENS: "tokens",
    "num_vision_tokens": "vision_tokens",
    "num_target_tokens": "target_tokens",
    "image_nbytes": "image_nbytes",
    "row": "row",
}
"""Columns of the CSV and the fields of a row; ``source`` is the last column. An image counts as one tile."""


class FoundFiles:
    """Writes what is found; training rows' sizes as ``flowtrain pack --lengths`` reads them.

    names, indexes: of the sources. Those after the first ``num_train`` are held out, and have no rows in the sizes.
    """

    def __init__(
        self,
        sizes: TextIO | None,
        rejected: TextIO | None,
        names: list[str],
        indexes: Sequence[SourceIndex],
        num_train: int,
    ) -> None:
        self._sizes = None if sizes is None else csv.writer(sizes, lineterminator="\n")
        self._rejected = rejected
        self._names = names
        self._indexes = indexes
        self._num_train = num_train
        if self._sizes is not None:
            self._sizes.writerow([*_SIZES, "source"])

    def write(self, found: BlockFound) -> None:
        """Write the rows of a block."""
        source = found.task.source
        if self._sizes is not None and source < self._num_train:
            columns = [found.rows[field].tolist() for field in _SIZES.values()]
            self._sizes.writerows([*row, self._names[source]] for row in zip(*columns, strict=True))
        if self._rejected is not None:
            for row in found.rejected:
                record = rejected_record(self._names, self._indexes, row)
                self._rejected.write(json.dumps({"schema": CHECK_SCHEMA, **record}) + "\n")


@contextmanager
def whole_files(paths: Sequence[Path | None]) -> Iterator[list[TextIO | None]]:
    """Open files that get their names only when all is written; None for None. Raises ConfigError."""
    parts = [None if path is None else path.with_name(f".{path.name}.part") for path in paths]
    files: list[TextIO | None] = []
    try:
        for part in parts:
            files.append(None if part is None else _opened(part))
        yield files
        _close(files)
        for part, path in zip(parts, paths, strict=True):
            if part is not None and path is not None:
                part.replace(path)
    finally:
        _close(files)
        for part in parts:
            if part is not None:
                part.unlink(missing_ok=True)


def _opened(path: Path) -> TextIO:
    try:
        return path.open("w", encoding="utf-8", errors="backslashreplace", newline="")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def _close(files: Sequence[TextIO | None]) -> None:
    for file in files:
        if file is not None:
            file.close()
