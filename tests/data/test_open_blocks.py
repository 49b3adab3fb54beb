"""Open blocks and the feed over them: each block is read once, each row handed out once, and nothing is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.data import read_ahead
from flowtrain.data.open_blocks import HeldRow, OpenBlocks, open_blocks_of
from flowtrain.data.read_ahead import BlockKey, ReadAhead
from flowtrain.data.sampler import Draw, Sampler
from flowtrain.data.sizing import LoadedSample, MeasuredSample
from flowtrain.data.sources.base import BadSample, Buffer, RawImage, RawSample
from flowtrain.types.memory import Extent
from flowtrain.types.samples import ImageLayout, Rejection, RejectReason, SampleRef

IMAGE = b"image"


@dataclass
class FakeRecord:
    """Row r: bad if r % 7 == 3, without an image if r % 5 == 1."""

    source: int
    row: int

    def sample(self) -> RawSample:
        if self.row % 7 == 3:
            raise BadSample(RejectReason.MALFORMED_SAMPLE, f"row {self.row}")
        images = () if self.row % 5 == 1 else (RawImage(data=f"{self.source}/{self.row}".encode()),)
        return RawSample(images, ())

    def stored_text(self) -> str:
        raise AssertionError("only people look at it")


@dataclass
class FakeSources:
    tables: list[np.ndarray]
    reads: Counter[tuple[int, int]] = field(default_factory=Counter)
    room: int = 1 << 20
    again: list[int] = field(default_factory=list)

    def block_of(self, source: int, row: int) -> int:
        return int(np.searchsorted(self.tables[source], row, side="right")) - 1

    def rows_of(self, source: int, block: int) -> tuple[int, int]:
        return int(self.tables[source][block]), int(self.tables[source][block + 1])

    def held_nbytes(self, source: int, block: int, alignment: int) -> int:
        return self.room

    def record(self, ref: SampleRef) -> FakeRecord:
        self.again.append(ref.row)
        return FakeRecord(ref.source, ref.row)

    def read_block(self, source: int, block: int) -> Sequence[FakeRecord]:
        self.reads[source, block] += 1
        return [FakeRecord(source, row) for row in range(*self.rows_of(source, block))]


class FakeShelf:
    """Numbers what is put."""

    def __init__(self) -> None:
        self.held: dict[int, bytes] = {}
        self.shared: Counter[int] = Counter()
        self.most = 0
        self._last = 0

    def put(self, pieces: Sequence[Buffer]) -> tuple[Extent, ...]:
        self._last += 1
        self.held[self._last] = b"".join(bytes(piece) for piece in pieces)
        self.most = max(self.most, len(self.held))
        return (Extent(self._last, 1),)

    def share(self, extents: Sequence[Extent]) -> None:
        self.shared.update(extent.gva for extent in extents)

    def free(self, extents: Sequence[Extent]) -> None:
        for extent in extents:
            if self.shared[extent.gva]:
                self.shared[extent.gva] -= 1
            else:
                del self.held[extent.gva]


def load(ref: SampleRef, raw: RawSample) -> LoadedSample:
    data = tuple(image.read(1 << 20) for image in raw.images)
    return LoadedSample(MeasuredSample((), None, (ImageLayout(1, 1, 1),) * len(data), tuple(map(len, data))), data)


class Reader:
    """One feeder's reading, from a position of the order on."""

    def __init__(
        self,
        sampler: Sampler,
        tables: list[np.ndarray],
        feeder: int,
        num_feeders: int,
        end: int,
        num_blocks: int = 2,
    ) -> None:
        self.sampler = sampler
        self.sources = FakeSources(tables)
        self.shelf = FakeShelf()
        self.owns = lambda draw: draw.lane % num_feeders == feeder
        self.ahead = ReadAhead(self.sources, sampler.copy(), self.owns, num_blocks, end)  # type: ignore[arg-type]
        to_come = open_blocks_of(sampler)
        self.blocks = OpenBlocks(self.sources, self.ahead, self.shelf, load, 1, to_come)  # type: ignore[arg-type]

    def step(self, count: int, skipped: frozenset[int] = frozenset()) -> list[Draw]:
        """Draw, and check each of the own rows; returns their draws."""
        mine = [draw for draw in self.sampler.take(count) if self.owns(draw)]
        for draw in mine:
            if draw.ref.position in skipped:
                self.blocks.skip(draw)
                continue
            row, ref = self.blocks.take(draw), draw.ref
            if ref.row % 7 == 3:
                assert isinstance(row, Rejection) and row.ref == ref and str(ref.row) in row.detail
            elif ref.row % 5 == 1:
                assert isinstance(row, RawSample)
            else:
                assert isinstance(row, HeldRow)
                assert self.shelf.held[row.extents[0].gva] == f"{ref.source}/{ref.row}".encode()
                self.shelf.free(row.extents)
        return mine


@contextmanager
def closing(readers: list[Reader]) -> Iterator[list[Reader]]:
    try:
        yield readers
    finally:
        for reader in readers:
            reader.ahead.close()


@st.composite
def orders(draw: st.DrawFn) -> tuple[list[np.ndarray], str, int, int]:
    """Block tables of some sources, an order, its lanes, and a number of feeders."""
    sizes = st.lists(st.integers(1, 9), min_size=1, max_size=6)
    tables = [np.cumsum([0, *blocks]) for blocks in draw(st.lists(sizes, min_size=1, max_size=3))]
    return tables, draw(st.sampled_from(["blocks", "none"])), draw(st.integers(1, 5)), draw(st.integers(1, 4))


@given(orders(), st.integers(0, 100), st.integers(1, 60))
def test_each_block_is_read_once_an_epoch_by_one_feeder(
    order: tuple[list[np.ndarray], str, int, int], seed: int, most_ahead: int
) -> None:
    """However far a feeder looks ahead."""
    tables, shuffle, lanes, num_feeders = order
    # As many samples of each source as it has rows, so that all epochs end together.
    weights = [float(table[-1]) for table in tables]
    total = 2 * sum(int(table[-1]) for table in tables)
    samplers = [Sampler(tables, weights, seed, shuffle, lanes) for _ in range(num_feeders)]  # type: ignore[arg-type]
    with (
        patch.object(read_ahead, "MOST_AHEAD", most_ahead),
        closing([Reader(s, tables, i, num_feeders, total) for i, s in enumerate(samplers)]) as readers,
    ):
        drawn = [draw for reader in readers for draw in reader.step(total)]
    assert sorted(draw.ref.position for draw in drawn) == list(range(total))
    assert not any(reader.shelf.held for reader in readers)
    reads = sum((reader.sources.reads for reader in readers), Counter())
    assert reads == {(s, b): 2 for s, table in enumerate(tables) for b in range(len(table) - 1)}
    for reader in readers:
        own_lanes = -(-lanes // num_feeders) if shuffle == "blocks" else 1
        assert reader.shelf.most <= sum(own_lanes * int(np.diff(table).max()) for table in tables)


@given(orders(), st.integers(0, 100), st.data())
def test_a_successor_reads_the_rows_to_come_of_open_blocks(
    order: tuple[list[np.ndarray], str, int, int], seed: int, data: st.DataObject
) -> None:
    """Also with another number of feeders, and with positions that were consumed ahead."""
    tables, shuffle, lanes, num_feeders = order
    weights = [1.0] * len(tables)
    total = 3 * sum(int(table[-1]) for table in tables)
    first = data.draw(st.integers(0, total - 1))
    consumed = frozenset(data.draw(st.sets(st.integers(first, total - 1), max_size=5)))
    sampler = Sampler(tables, weights, seed, shuffle, lanes)  # type: ignore[arg-type]
    sampler.take(first)
    readers = [Reader(sampler.copy(), tables, i, num_feeders, total) for i in range(num_feeders)]
    with closing(readers):
        drawn = [draw for reader in readers for draw in reader.step(total - first, consumed)]
    assert sorted(draw.ref.position for draw in drawn) == list(range(first, total))
    expected = sampler.take(total - first)
    assert sorted(drawn, key=lambda draw: draw.ref.position) == expected
    for reader in readers:  # what is left belongs to rows that come after the last position
        assert len(reader.shelf.held) <= sum(int(np.diff(table).max()) * lanes for table in tables)


def test_a_block_is_read_before_its_turn() -> None:
    tables = [np.array([0, 4, 8, 12])]
    sampler = Sampler(tables, [1.0], 0, "none", 1)
    with closing([Reader(sampler, tables, 0, 1, 12)]) as (reader,):
        reader.ahead._threads.shutdown(wait=True)
        assert set(reader.sources.reads) == {(0, 0), (0, 1)}, "two blocks ahead, and no more"
        assert set(reader.ahead._reads) == {BlockKey(0, 0, 0), BlockKey(0, 0, 1)}


def test_a_block_is_not_read_while_another_is_in_memory() -> None:
    tables = [np.array([0, 4, 8, 12])]
    sampler = Sampler(tables, [1.0], 0, "none", 1)
    with closing([Reader(sampler, tables, 0, 1, 12, num_blocks=1)]) as (reader,):
        begun = []
        put = reader.shelf.put

        def watched(pieces: Sequence[Buffer]) -> tuple[Extent, ...]:
            begun.append(set(reader.ahead._reads))
            return put(pieces)

        reader.shelf.put = watched  # type: ignore[method-assign]
        reader.step(1)
        assert begun and not any(begun), "the block is still moved to the shelf"
        assert set(reader.ahead._reads) == {BlockKey(0, 0, 1)}


def test_nothing_is_read_for_positions_after_the_end() -> None:
    tables = [np.array([0, 4, 8, 12])]
    sampler = Sampler(tables, [1.0], 0, "none", 1)
    with closing([Reader(sampler, tables, 0, 1, 4)]) as (reader,):
        reader.step(4)
    assert set(reader.sources.reads) == {(0, 0)}


def test_a_feeder_without_a_lane_does_not_search_the_whole_run() -> None:
    tables = [np.array([0, 4])]
    sampler = Sampler(tables, [1.0], 0, "blocks", 64)
    with closing([Reader(sampler, tables, 1, 2, 1 << 62)]) as (reader,):
        assert not reader.step(4)
        assert reader.ahead._scout.state().next_position == read_ahead.MOST_AHEAD


def test_an_error_of_storage_reaches_the_feeder() -> None:
    tables = [np.array([0, 4])]
    sampler = Sampler(tables, [1.0], 0, "none", 1)
    sources = FakeSources(tables)

    def fail(source: int, block: int) -> Sequence[FakeRecord]:
        raise OSError("the disk is gone")

    sources.read_block = fail  # type: ignore[method-assign]
    ahead = ReadAhead(sources, sampler.copy(), lambda draw: True, 2, 4)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="the disk is gone"):
        ahead.take(BlockKey(0, 0, 0))
    ahead.close()


def rows_of(reader: Reader, count: int) -> list[HeldRow | RawSample]:
    """Take the next rows, and check their images."""
    found = []
    for draw in reader.sampler.take(count):
        row = reader.blocks.take(draw)
        assert not isinstance(row, Rejection)
        if isinstance(row, HeldRow):
            assert reader.shelf.held[row.extents[0].gva] == f"0/{draw.ref.row}".encode()
        found.append(row)
    return found


def test_rows_without_room_are_read_again_at_their_turn() -> None:
    """Images that a file stores once for several rows may take more memory than was counted for their block."""
    tables = [np.array([0, 3])]
    sampler = Sampler(tables, [1.0], 0, "none", 1)
    with closing([Reader(sampler, tables, 0, 1, 3)]) as (reader,):
        reader.sources.room = 4  # for one image of three bytes
        first, without, last = rows_of(reader, 3)
        assert isinstance(first, HeldRow) and isinstance(without, RawSample) and not without.images
        assert isinstance(last, RawSample) and last.images and reader.sources.again == [2]


def test_rows_with_the_same_images_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [np.array([0, 10])]
    sampler = Sampler(tables, [1.0], 0, "none", 1)
    images = (RawImage(data=memoryview(b"one" * 50)), RawImage(data=b"two" * 50))
    other = (*images[:1], RawImage(data=b"two" * 49 + b"TWO"))
    monkeypatch.setattr(FakeRecord, "sample", lambda self: RawSample(other if self.row == 4 else images, ()))
    with closing([Reader(sampler, tables, 0, 1, 10)]) as (reader,):
        draws = sampler.take(10)
        rows = [reader.blocks.take(draw) for draw in draws]
        assert len(reader.shelf.held) == 2 and all(isinstance(row, HeldRow) for row in rows)
        for row in rows[:-1]:
            assert isinstance(row, HeldRow) and reader.shelf.held[row.extents[0].gva]
            reader.shelf.free(row.extents)
        assert len(reader.shelf.held) == 1, "the last user is left"


def test_what_was_not_handed_out_is_freed_when_the_order_is_given_up() -> None:
    tables = [np.array([0, 4, 10])]
    sampler = Sampler(tables, [1.0], 0, "none", 1)
    with closing([Reader(sampler, tables, 0, 1, 10)]) as (reader,):
        reader.step(1)
        assert reader.shelf.held
        reader.blocks.drop()
        assert not reader.shelf.held
