"""A feeder reads and sizes its share of the samples, and puts their texts and encoded images into the pool."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing

import numpy as np

from flowtrain.actors.garbage import expect_many_objects
from flowtrain.actors.link import CoordinatorLink
from flowtrain.actors.pooling import PoolMember, join_pool
from flowtrain.actors.spans import SpanLog
from flowtrain.actors.whereabouts import Diary
from flowtrain.config.run import RunConfig
from flowtrain.data.feed import Feed, FeederPlace
from flowtrain.data.sources.base import Buffer
from flowtrain.data.sources.retries import RETRIES
from flowtrain.errors import OutOfPoolMemory
from flowtrain.flow.api import CoordinatorApi
from flowtrain.types.memory import Extent
from flowtrain.types.messages import FeedReport, PartReady, Remake
from flowtrain.types.plan import Unit
from flowtrain.types.samples import SamplerState
from flowtrain.types.sources import SourceIndex
from flowtrain.types.whereabouts import START, Whereabouts

SEGMENT_KNOB = "pool.feeder_segment_nbytes"


class _Stopped(Exception):
    """The run ended while the feeder waited for room."""


def feeder_name(feeder: int) -> str:
    """Return the name of a feeder's actor."""
    return f"feeder-{feeder}"


class Feeder:
    """Runs the plain ``Feed``: a thin shell that puts bytes into the pool and reports to the coordinator.

    indexes: of the sources, which the driver has made.
    feeder, num_feeders: which feeder this is, from 0, and of how many.
    segment_nbytes: DRAM that it gives to the pool, in bytes.
    """

    def __init__(
        self,
        config: RunConfig,
        run_id: str,
        indexes: Sequence[SourceIndex],
        feeder: int = 0,
        num_feeders: int = 1,
        segment_nbytes: int = 1 << 26,
    ) -> None:
        self._config = config
        self._run_id = run_id
        self._indexes = indexes
        self._place = FeederPlace(feeder, num_feeders)
        self._name = feeder_name(feeder)
        self._segment_nbytes = segment_nbytes
        self._spans = SpanLog(self._name)
        self._diary = Diary()

    def whereabouts(self) -> Whereabouts:
        """Return what this feeder does now."""
        return self._diary.read()

    def run(self, link: CoordinatorLink) -> None:
        """Feed until the coordinator sends stop."""
        self._diary.begin(START, may_last=True)
        expect_many_objects()
        self._spans.follow(link)
        config = self._config
        member = join_pool(
            link,
            config.pool,
            self._run_id,
            self._name,
            self._segment_nbytes,
            SEGMENT_KNOB,
            feeder=self._place.feeder,
        )
        state = member.joined.sampler_state
        assert state is not None
        segment = _Segment(link, member, self._diary)
        try:
            start: SamplerState | None = state
            while start is not None:
                with closing(Feed.from_config(config, self._indexes, start, segment, self._place)) as feed:
                    start = self._serve(link, member, segment, feed)
                    if start is not None:
                        feed.drop()
        except _Stopped:
            pass
        finally:
            member.pool.close()

    def _serve(self, link: CoordinatorLink, member: PoolMember, segment: _Segment, feed: Feed) -> SamplerState | None:
        """Feed until the end, and return None; or until the run goes back, and return the state to start at."""
        report = FeedReport()
        while True:
            self._diary.begin("a wait for an order", may_last=True)
            order = link.ask(CoordinatorApi.feed, member.index, report)
            segment.free(order.released)
            if order.stop or order.starts_at is not None:
                return order.starts_at
            if order.unit is not None:
                report = self._size(member, feed, order.unit, frozenset(order.consumed))
            else:
                report = FeedReport(remade=self._remake(feed, order.remake), stats=member.pool.stats())

    def _remake(self, feed: Feed, lost: Sequence[Remake]) -> tuple[PartReady, ...]:
        self._diary.begin("a sample to produce again")
        # In the order of the data, so that a block is read once for all that was lost of it.
        orders = sorted(lost, key=lambda order: (order.ref.source, order.ref.row))
        return tuple([part for order in orders for part in feed.remake(order)])

    def _size(self, member: PoolMember, feed: Feed, unit: Unit, consumed: frozenset[int]) -> FeedReport:
        started = time.monotonic()
        self._diary.begin(f"a sample of step {unit.step}")
        share = feed.next_unit(unit, consumed)
        num_samples = len(share.sized) + len(share.rejections)
        self._spans.add("size", started, time.monotonic(), step=unit.step, samples=num_samples)
        return FeedReport(
            unit=unit,
            sized=tuple(share.sized),
            texts=tuple(share.texts),
            images=tuple(share.images),
            rejections=tuple(share.rejections),
            sampler_state=feed.state(),
            stats=member.pool.stats(),
            spans=self._spans.take(),
            num_retries=RETRIES.take(),
        )


class _Segment:
    """The feeder's segment as its shelf. While it is full, the feeder waits for the backbone to release memory."""

    def __init__(self, link: CoordinatorLink, member: PoolMember, diary: Diary) -> None:
        self._diary = diary
        self._link = link
        self._member = member
        self._more_users: Counter[int] = Counter()  # by address: users beside the first

    def put(self, pieces: Sequence[Buffer]) -> tuple[Extent, ...]:
        """See ``Shelf``."""
        arrays = [np.frombuffer(piece, dtype=np.uint8) for piece in pieces]
        nbytes = sum(len(array) for array in arrays)
        while True:
            try:
                room = self._member.pool.reserve(nbytes)
            except OutOfPoolMemory:
                self._diary.begin("a wait for room", may_last=True)
                order = self._link.ask(CoordinatorApi.wait_for_room, self._member.index)
                self.free(order.released)
                if order.stop:
                    raise _Stopped from None
            else:
                break
        with room:
            _fill(room.views, arrays)
            extents = room.commit()
        self._diary.begin("the next sample")  # each has the whole limit for itself
        return extents

    def share(self, extents: Sequence[Extent]) -> None:
        """See ``Shelf``."""
        self._more_users.update(extent.gva for extent in extents)

    def free(self, extents: Sequence[Extent]) -> None:
        """See ``Shelf``; also for what the coordinator has released, once for each part."""
        self._member.pool.release([extent for extent in extents if not self._has_other_users(extent)])

    def _has_other_users(self, extent: Extent) -> bool:
        """Take one user from an extent; returns whether another is left."""
        count = self._more_users.pop(extent.gva, 0)
        if count > 1:
            self._more_users[extent.gva] = count - 1
        return count > 0


def _fill(views: Sequence[np.ndarray], arrays: Sequence[np.ndarray]) -> None:
    """Copy arrays, one after another, into views of the same length in all."""
    runs = iter(views)
    run = next(runs)
    for array in arrays:
        while len(array):
            if not len(run):
                run = next(runs)
            count = min(len(run), len(array))
            run[:count] = array[:count]
            run, array = run[count:], array[count:]
