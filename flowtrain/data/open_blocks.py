"""The blocks that a feeder has open: each was read once, and its rows wait for their turn.

Encoded images inside a block lie in the feeder's pool segment from then on, since a parquet file gives them all at
once: by default its writers make one page of a whole row group. So they are counted, and freed row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from flowtrain.costs.flops import IntArray
from flowtrain.data.read_ahead import BlockKey, ReadAhead
from flowtrain.data.rejections import rejected
from flowtrain.data.sampler import Draw, Sampler
from flowtrain.data.sizing import LoadedSample, MeasuredSample
from flowtrain.data.sources.base import Buffer, RawSample, Record
from flowtrain.data.sources.source_set import SourceSet
from flowtrain.types.memory import Extent
from flowtrain.types.samples import Rejection, SampleRef

_NO_POSITION = -1
"""Of a row before its turn."""


def open_blocks_of(sampler: Sampler) -> dict[BlockKey, IntArray]:
    """Return the blocks that are open where a sampler stands, each with its rows still to come."""
    state = sampler.state()
    return {
        BlockKey(source, count // size, block): rows
        for source, (count, size) in enumerate(zip(state.counts, state.sizes, strict=True))
        for block, rows in sampler.open_rows(source).items()
    }


class Shelf(Protocol):
    """Where a feeder puts bytes: its segment of the pool."""

    def put(self, pieces: Sequence[Buffer]) -> tuple[Extent, ...]:
        """Put bytes, one piece after another; waits for room."""

    def free(self, extents: Sequence[Extent]) -> None:
        """Free bytes that no process knows of."""


@dataclass(frozen=True, slots=True)
class HeldRow:
    """A row whose images lie on the shelf."""

    measured: MeasuredSample
    extents: tuple[Extent, ...]


Row = HeldRow | RawSample | Rejection
"""A row of an open block. A RawSample's images, if any, are put on the shelf at its turn: they are files, or more than
the block is counted for."""


class OpenBlocks:
    """Hands out the rows of blocks in any order, each once. Not thread-safe.

    load: reads and measures the images of a row.
    shelf: takes the images.
    rows_to_come: rows that are still to come of the blocks that are open at the start.
    """

    def __init__(
        self,
        sources: SourceSet,
        reader: ReadAhead,
        shelf: Shelf,
        load: Callable[[SampleRef, RawSample], LoadedSample | Rejection],
        rows_to_come: Mapping[BlockKey, IntArray],
    ) -> None:
        self._sources = sources
        self._reader = reader
        self._shelf = shelf
        self._load = load
        self._rows_to_come: dict[BlockKey, Iterable[int]] = dict(rows_to_come)
        self._rows: dict[BlockKey, dict[int, Row]] = {}

    def take(self, draw: Draw) -> Row:
        """Return a drawn row. The first draw of a block opens it. Raises as ``Source.read_block``."""
        ref = draw.ref
        key = BlockKey(ref.source, ref.epoch, self._sources.block_of(ref.source, ref.row))
        rows = self._rows.get(key)
        if rows is None:
            rows = self._rows[key] = self._open(key)
            self._reader.read_more(ref.position)
        row = rows.pop(ref.row)
        if not rows:
            del self._rows[key]
            self._reader.forget(key)
        return replace(row, ref=ref) if isinstance(row, Rejection) else row

    def skip(self, draw: Draw) -> None:
        """Leave out a drawn row."""
        row = self.take(draw)
        if isinstance(row, HeldRow):
            self._shelf.free(row.extents)

    def _open(self, key: BlockKey) -> dict[int, Row]:
        first, last = self._sources.rows_of(key.source, key.block)
        wanted = self._rows_to_come.pop(key, range(first, last))
        records = self._reader.take(key)
        room = self._sources.image_nbytes_of(key.source, key.block)
        rows: dict[int, Row] = {}
        for row in wanted:
            found = rows[int(row)] = self._row(key, int(row), records[row - first], room)
            if isinstance(found, HeldRow):
                room -= sum(found.measured.image_nbytes)
        # The block's images are on the shelf now, and its memory is freed before another block takes as much.
        return rows

    def _row(self, key: BlockKey, row: int, record: Record, room: int) -> Row:
        """Return a row; its images are put on the shelf if they have at most ``room`` bytes.

        A block that stores an image once for many rows would need more of the shelf than it is counted for. The images
        of its last rows stay where they were read, until their turn.
        """
        ref = SampleRef(_NO_POSITION, key.source, row, key.epoch)
        raw = sample_of(ref, record)
        if isinstance(raw, Rejection) or not raw.images or any(image.is_file for image in raw.images):
            return raw
        loaded = self._load(ref, raw)
        if isinstance(loaded, Rejection):
            return loaded
        if sum(loaded.measured.image_nbytes) > room:
            return raw
        return HeldRow(loaded.measured, self._shelf.put(loaded.images))


def sample_of(ref: SampleRef, record: Record) -> RawSample | Rejection:
    """Return the sample of a row as it was read; whatever is wrong with it becomes a rejection."""
    try:
        return record.sample()
    except BaseException as error:
        return rejected(ref, error)
