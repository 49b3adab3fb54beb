"""``ledger.parquet``: the outcome of every position, so that others can audit a run.

It is a directory of part files, one per flush, named by their steps (a resume may have dropped later ones). Any Parquet
reader reads the directory as one table.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from flowtrain.errors import CheckpointError
from flowtrain.observability.files import PRIVATE_DIRECTORY, replace_bytes, sync_directory
from flowtrain.types.events import LEDGER_SCHEMA

logger = logging.getLogger(__name__)

SCHEMA = pa.schema(
    [
        ("position", pa.int64()),
        ("source", pa.string()),
        ("row", pa.int64()),
        ("epoch", pa.int64()),
        ("step", pa.int64()),
        ("dp_rank", pa.int32()),
        ("microbatch", pa.int32()),
        ("state", pa.string()),
    ],
    metadata={"schema": str(LEDGER_SCHEMA)},
)
MAX_WAITING_ROWS = 1 << 20
"""Rows that memory holds while they cannot be written."""
_PART = re.compile(r"part-(\d+)-(\d+)\.parquet")


class LedgerState(StrEnum):
    """The outcome of a position."""

    CONSUMED = "consumed"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One position."""

    position: int
    source: str
    """Name of its source."""
    row: int
    epoch: int
    step: int
    dp_rank: int | None
    """None for a sample that was rejected before it was planned."""
    microbatch: int | None
    """None for a sample that was rejected before it was planned."""
    state: LedgerState


class LedgerWriter:
    """Buffers rows and writes them as one part file at each ``flush``.

    Flush before a checkpoint becomes complete: then the ledger has every step before the one where a resume starts.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: list[LedgerRow] = []
        self._is_synced = True
        path.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)

    def append(self, rows: Sequence[LedgerRow]) -> None:
        """Add rows to the buffer."""
        self._rows.extend(rows)

    @property
    def holds_too_much(self) -> bool:
        """Whether more rows wait than memory should hold."""
        return len(self._rows) > MAX_WAITING_ROWS

    @property
    def waiting_nbytes(self) -> int:
        """Bytes of the part file that ``flush`` would write."""
        return len(self._encoded_rows())

    def flush(self) -> None:
        """Write the buffered rows durably; a kill leaves the whole part file or nothing.

        An OSError leaves the rows in the buffer, and the files as they were.
        """
        if self._rows:
            replace_bytes(self._target, self._encoded_rows())
            self._rows.clear()
            self._is_synced = False
        if not self._is_synced:
            sync_directory(self.path)
            self._is_synced = True

    def truncate_after(self, step: int) -> None:
        """Drop the rows of later steps, before a run resumes from a checkpoint of ``step``."""
        self._rows = [row for row in self._rows if row.step <= step]
        for torn in self.path.glob(".part-*.tmp"):
            torn.unlink()
        for part, first, last in _parts(self.path):
            if last <= step:
                continue
            if first <= step:
                table = pq.read_table(part, schema=SCHEMA)
                replace_bytes(part, _encoded(table.filter(pc.less_equal(table["step"], step))))
            else:
                part.unlink()
        sync_directory(self.path)

    @property
    def _target(self) -> Path:
        """The part file of the buffered rows."""
        steps = [row.step for row in self._rows]
        return self.path / f"part-{min(steps):08d}-{max(steps):08d}.parquet"

    def _encoded_rows(self) -> bytes:
        table = pa.Table.from_pylist([asdict(row) for row in self._rows], schema=SCHEMA)
        if self._target.exists():  # a second flush within the same steps
            table = pa.concat_tables([pq.read_table(self._target, schema=SCHEMA), table])
        return _encoded(table)


def read_ledger(path: Path) -> pa.Table:
    """The whole ledger, in order of position. Raises CheckpointError if there is none."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no ledger here; a run writes one at its first checkpoint")
    tables = [pq.read_table(part, schema=SCHEMA) for part, _, _ in _parts(path)]
    return pa.concat_tables([SCHEMA.empty_table(), *tables]).sort_by("position")


def ledger_steps(path: Path) -> Iterator[int]:
    """Yield each step of a ledger's part files, some more than once; a part that cannot be read has none.

    Raises FileNotFoundError if there is no ledger.
    """
    for part, _, _ in _parts(path):
        try:
            steps = pq.read_table(part, columns=["step"])["step"]
        except (OSError, ValueError) as error:  # torn: pyarrow's ArrowInvalid is a ValueError
            logger.warning("%s is skipped: %s", part, error)
        else:
            yield from pc.unique(steps).to_pylist()


def _parts(path: Path) -> list[tuple[Path, int, int]]:
    named = ((part, _PART.fullmatch(part.name)) for part in sorted(path.iterdir()))
    return [(part, int(match[1]), int(match[2])) for part, match in named if match]


def _encoded(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return bytes(sink.getvalue())
