"""The blocks that a feeder has open: each was read once, and its rows wait for their turn.

Encoded images inside a block lie in the feeder's pool segment from then on, since a parquet file gives them all at
once: by default its writers make one page of a whole row group. So they are counted, and freed row by row.
"""

from __future__ import annotations

import enum
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

_KEY_NBYTES = 64
"""Bytes at both ends by which images are told apart before they are compared."""
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

    def share(self, extents: Sequence[Extent]) -> None:
        """Count one more user of bytes, which are free when all users have freed them."""

    def free(self, extents: Sequence[Extent]) -> None:
        """Free bytes that no process knows of."""


@dataclass(frozen=True, slots=True)
class HeldRow:
    """A row whose images lie on the shelf; none do if images are not kept."""

    measured: MeasuredSample
    extents: tuple[Extent, ...]


class _Later(enum.Enum):
    """A row for whose images the block has no room; it is read again at its turn."""

    LATER = enum.auto()


Row = HeldRow | RawSample | Rejection
"""A row of an open block; a RawSample has no images, or they are files, or the block had no room for them."""


class OpenBlocks:
    """Hands out the rows of blocks in any order, each once. Not thread-safe.

    load: reads and measures the images of a row.
    shelf: takes the images.
    alignment: of what the shelf takes, in bytes.
    rows_to_come: rows that are still to come of the blocks that are open at the start.
    """

    def __init__(
        self,
        sources: SourceSet,
        reader: ReadAhead,
        shelf: Shelf,
        load: Callable[[SampleRef, RawSample], LoadedSample | Rejection],
        alignment: int,
        rows_to_come: Mapping[BlockKey, IntArray],
    ) -> None:
        self._sources = sources
        self._reader = reader
        self._shelf = shelf
        self._load = load
        self._rows_to_come: dict[BlockKey, Iterable[int]] = dict(rows_to_come)
        self._alignment = alignment
        self._rows: dict[BlockKey, dict[int, Row | _Later]] = {}

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
        if isinstance(row, _Later):
            return sample_of(ref, self._sources.record(ref))
        return replace(row, ref=ref) if isinstance(row, Rejection) else row

    def skip(self, draw: Draw) -> None:
        """Leave out a drawn row."""
        row = self.take(draw)
        if isinstance(row, HeldRow):
            self._shelf.free(row.extents)

    def drop(self) -> None:
        """Free the rows that were not handed out."""
        for rows in self._rows.values():
            for row in rows.values():
                if isinstance(row, HeldRow):
                    self._shelf.free(row.extents)
        self._rows.clear()

    def _open(self, key: BlockKey) -> dict[int, Row | _Later]:
        first, last = self._sources.rows_of(key.source, key.block)
        wanted = self._rows_to_come.pop(key, range(first, last))
        records = self._reader.take(key)
        room = _Room(self._shelf, self._sources.held_nbytes(key.source, key.block, self._alignment), self._alignment)
        # The block's images are on the shelf then, and its memory is freed before another block takes as much.
        return {int(row): self._row(key, int(row), records[row - first], room) for row in wanted}

    def _row(self, key: BlockKey, row: int, record: Record, room: _Room) -> Row | _Later:
        ref = SampleRef(_NO_POSITION, key.source, row, key.epoch)
        raw = sample_of(ref, record)
        if isinstance(raw, Rejection) or not raw.images or any(image.is_file for image in raw.images):
            return raw
        loaded = self._load(ref, raw)
        if isinstance(loaded, Rejection):
            return loaded
        extents = room.put(loaded.images) if loaded.images else ()
        return HeldRow(loaded.measured, extents) if extents is not None else _Later.LATER


class _Room:
    """A block's room on the shelf while it is opened.

    Images that are stored once for many rows could take more than what is stored of them, and a run that waits for
    room that was not counted would never go on. So rows with the same images share them, and what still does not fit
    is not put.
    """

    def __init__(self, shelf: Shelf, nbytes: int, alignment: int) -> None:
        self._shelf = shelf
        self._left_nbytes = nbytes
        self._alignment = alignment
        self._held: dict[tuple[object, ...], tuple[tuple[Buffer, ...], tuple[Extent, ...]]] = {}

    def put(self, images: tuple[Buffer, ...]) -> tuple[Extent, ...] | None:
        """Put a row's images, or share those of another row; None if there is no room left for them."""
        key = (*map(len, images), bytes(images[0][:_KEY_NBYTES]), bytes(images[-1][-_KEY_NBYTES:]))
        others, extents = self._held.get(key, ((), ()))
        if others == images:
            self._shelf.share(extents)
            return extents
        nbytes = -(-sum(map(len, images)) // self._alignment) * self._alignment
        if nbytes > self._left_nbytes:
            return None
        self._left_nbytes -= nbytes
        extents = self._shelf.put(images)
        self._held[key] = images, extents
        return extents


def sample_of(ref: SampleRef, record: Record) -> RawSample | Rejection:
    """Return the sample of a row as it was read; whatever is wrong with it becomes a rejection."""
    try:
        return record.sample()
    except BaseException as error:
        return rejected(ref, error)
