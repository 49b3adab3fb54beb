"""The feeder sizes samples in position order and puts their text into the pool."""

from __future__ import annotations

import time

from flowtrain.actors.garbage import expect_many_objects
from flowtrain.actors.link import CoordinatorLink, Patience
from flowtrain.actors.pooling import PoolMember, join_pool
from flowtrain.config.run import RunConfig
from flowtrain.data.feed import Feed
from flowtrain.data.sizing import SizedResult
from flowtrain.errors import OutOfPoolMemory
from flowtrain.flow.api import CoordinatorApi
from flowtrain.types.messages import FeedReport, PartReady, Span
from flowtrain.types.plan import Unit
from flowtrain.types.samples import TEXT_PART, Rejection, SampleRef

NAME = "feeder-0"


class _Stopped(Exception):
    """The run ended while the current unit waited for room."""


class Feeder:
    """Runs the plain ``Feed``: a thin shell that puts texts into the pool and reports to the coordinator."""

    def __init__(self, config: RunConfig, run_id: str) -> None:
        self._config = config
        self._run_id = run_id

    def run(self, link: CoordinatorLink) -> None:
        """Feed until the coordinator sends stop."""
        self._link = link
        self._feed = Feed.from_config(self._config)
        knob = "pool.text_segment_nbytes"
        expect_many_objects()
        member = join_pool(
            self._link, self._config.pool, self._run_id, NAME, self._config.pool.text_segment_nbytes, knob
        )
        assert member.joined.sampler_state is not None
        self._feed.restore(member.joined.sampler_state)
        try:
            self._serve(member)
        except _Stopped:
            pass
        finally:
            member.pool.close()

    def _serve(self, member: PoolMember) -> None:
        report = FeedReport()
        while True:
            order = self._link.ask(CoordinatorApi.feed, member.index, report)
            member.pool.release(order.released)
            if order.stop:
                return
            remade = tuple(self._remake(member, ref) for ref in order.remake)
            report = FeedReport(remade=remade, stats=member.pool.stats())
            if order.unit is not None:
                report = self._size(member, order.unit, frozenset(order.consumed), remade)

    def _size(
        self, member: PoolMember, unit: Unit, consumed: frozenset[int], remade: tuple[PartReady, ...]
    ) -> FeedReport:
        started = time.time()
        results = self._feed.next_unit(unit, consumed)
        sized = [result for result in results if not isinstance(result, Rejection)]
        texts = tuple(self._put(member, result) for result in sized)
        return FeedReport(
            unit=unit,
            sized=tuple(result.sample for result in sized),
            texts=texts,
            rejections=tuple(result for result in results if isinstance(result, Rejection)),
            sampler_state=self._feed.state(),
            remade=remade,
            stats=member.pool.stats(),
            spans=(Span(NAME, "size", started, time.time(), {"step": unit.step, "samples": len(results)}),),
        )

    def _remake(self, member: PoolMember, ref: SampleRef) -> PartReady:
        return self._put(member, self._feed.resize(ref))

    def _put(self, member: PoolMember, result: SizedResult) -> PartReady:
        """Put a text part; if the segment is full, wait until the backbone releases memory."""
        reason = "its pool segment is full of text not consumed yet"
        patience = Patience(NAME, self._config.limits, lambda: reason, endless=True)
        while True:
            try:
                extents = member.pool.put(result.text)
            except OutOfPoolMemory:
                order = self._link.ask(CoordinatorApi.wait_for_room, member.index)
                member.pool.release(order.released)
                if order.stop:
                    raise _Stopped from None
                patience.tick()
            else:
                return PartReady(result.sample.position, TEXT_PART, 0, extents)
