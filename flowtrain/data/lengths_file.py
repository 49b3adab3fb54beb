"""Sizes of samples from a CSV, to evaluate packing without the data."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flowtrain.config.data import DataConfig, Shuffle
from flowtrain.config.home import expanded
from flowtrain.costs.flops import IntArray
from flowtrain.data.sampler import Sampler
from flowtrain.errors import ConfigError
from flowtrain.scheduler.packing.base import Lengths

TILES, TOKENS = "num_image_tiles", "num_tokens"
MOST = (1 << 31) - 1
BLOCK_ROWS = 100
"""A CSV has no blocks; it is drawn as if stored in row groups of this many rows, as the hub stores parquet."""

_OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}


@dataclass(frozen=True, slots=True, eq=False)
class LengthsFile:
    """Rows of a CSV."""

    path: str
    """As given."""
    lengths: Lengths
    """Sizes of the rows, in file order; vision work is in image tiles."""

    @classmethod
    def read(cls, path: str | Path) -> LengthsFile:
        """Read a CSV with a header and the columns ``num_image_tiles`` and ``num_tokens``; other columns are ignored.

        num_tokens: of the whole backbone sequence, with vision tokens, at least 1. Raises ConfigError, which names the
        missing column or the line of a bad value.
        """
        try:
            with expanded(path).open(newline="", encoding="utf-8-sig") as file:
                rows = csv.DictReader(file, skipinitialspace=True)
                _check_columns(str(path), rows.fieldnames or ())
                sizes = [_sizes(str(path), rows.line_num, row) for row in rows]
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            reason = error.strerror if isinstance(error, OSError) else f"it is not a CSV in UTF-8 ({error})"
            raise ConfigError(f"lengths {path}: cannot be read: {reason}") from error
        if not sizes:
            raise ConfigError(f"lengths {path}: has a header and no rows")
        tiles, tokens = np.array(sizes, dtype=np.int64).T
        return cls(str(path), Lengths(np.ascontiguousarray(tokens), np.ascontiguousarray(tiles)))

    def num_oversized(self, max_seq_len: int) -> int:
        """Return the number of rows with more than ``max_seq_len`` tokens."""
        return int((self.lengths.tokens > max_seq_len).sum())

    def sampler(self, seed: int, shuffle: Shuffle, shuffle_blocks: int) -> Sampler:
        """Return the sampler of a run that has this file as its only source, in blocks of ``BLOCK_ROWS`` rows."""
        num_rows = len(self.lengths)
        first_rows = np.append(np.arange(0, num_rows, BLOCK_ROWS), num_rows)
        return Sampler([first_rows], [1.0], seed, shuffle, shuffle_blocks)

    def treated(self, rows: IntArray, data: DataConfig) -> Lengths:
        """Return the sizes of some rows, with ``data.oversized`` applied to rows longer than ``data.max_seq_len``.

        ``reject`` leaves them out. ``truncate_text`` cuts them to that length. A run would also reject samples whose
        images alone are longer, but a CSV does not contain that information.
        """
        tokens, tiles = self.lengths.tokens[rows], self.lengths.vision[rows]
        if data.oversized == "truncate_text":
            return Lengths(np.minimum(tokens, data.max_seq_len), tiles)
        kept = tokens <= data.max_seq_len
        return Lengths(tokens[kept], tiles[kept])


def _check_columns(path: str, found: Sequence[str]) -> None:
    missing = [column for column in (TILES, TOKENS) if column not in found]
    if not missing:
        return
    names = ", ".join(found) or "nothing"
    separators = [name for mark, name in _OTHER_SEPARATORS.items() if mark in names]
    raise ConfigError(
        f"lengths {path}: has no {'column' if len(missing) == 1 else 'columns'} {' and '.join(missing)}; its first "
        f"line names {names}, and {TILES} and {TOKENS} are needed"
        + (f"; it seems to be separated by {separators[0]}: separate it by commas" if separators else "")
    )


def _sizes(path: str, line: int, row: Mapping[str, str | None]) -> tuple[int, int]:
    return _number(path, line, row, TILES, least=0), _number(path, line, row, TOKENS, least=1)


def _number(path: str, line: int, row: Mapping[str, str | None], column: str, least: int) -> int:
    text = row[column]
    try:
        number = float(text or "")
    except ValueError:
        number = math.nan
    if not (number.is_integer() and least <= number <= MOST):
        raise ConfigError(
            f"lengths {path}, line {line}: {column} is {text or ''!r}; it must be an integer from {least} to {MOST}"
        )
    return int(number)
