"""The coordinator: the one place where control messages meet. A thin asynchronous shell round ``Flow``.

Every waiting method answers after ``poll_s`` at the latest, with None or an empty order; the caller asks again and
keeps its own limit, so that a wait can say who waits for what.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

from flowtrain.actors.flow import Flow
from flowtrain.actors.signals import Signal
from flowtrain.types.events import Event
from flowtrain.types.memory import Extent, SegmentExport
from flowtrain.types.messages import (
    EncoderReport,
    FeedOrder,
    FeedReport,
    Joined,
    LeaseOrder,
    MicrobatchLocation,
    RankReport,
    Span,
)
from flowtrain.types.plan import StepPlan

NOTHING_TO_LEASE = LeaseOrder(None, (), blocked=True, stop=False)
NOTHING_TO_FEED = FeedOrder(None, (), (), stop=False)


class Coordinator:
    """Answers feeder, encoders, backbone ranks and driver; all methods run on one event loop, one at a time.

    make_flow builds the Flow inside this process (it imports only pure rooms, so the actor starts fast).
    """

    def __init__(self, make_flow: Callable[[], Flow], poll_s: float = 5.0) -> None:
        self._flow = make_flow()
        self._poll_s = poll_s
        self._feed_signal = Signal()
        self._room_signal = Signal()
        self._lease_signal = Signal()
        self._plan_signal = Signal()
        self._event_signal = Signal()
        self._events_ended = False
        self._locate_signals: defaultdict[int, Signal] = defaultdict(Signal)

    # --- pool processes -----------------------------------------------------------------------------------------

    async def join(self, name: str, node_id: str) -> Joined:
        """A pool process takes its place; see Flow.join."""
        joined = self._flow.join(name, node_id)
        self._wake_producers()
        return joined

    async def publish(self, export: SegmentExport) -> None:
        """A process exports its segment."""
        self._flow.publish(export)

    async def exports(self) -> tuple[SegmentExport, ...]:
        """What all living processes export."""
        return self._flow.exports()

    async def name_lost(self, name: str, for_good: bool = False) -> None:
        """The process with this name died; for_good: and is not started again."""
        self._flow.name_lost(name, for_good)
        self._wake_producers()

    # --- feeder and encoders ------------------------------------------------------------------------------------

    async def feed(self, owner: int, report: FeedReport) -> FeedOrder:
        """The feeder reports, then waits for work."""
        refused = self._flow.feed(owner, report)
        self._plan_signal.notify()
        if report.unit is not None:
            self._lease_signal.notify()
        self._wake_backbone()
        self._event_signal.notify()
        order = await self._feed_signal.until(lambda: self._flow.feed_order(owner), self._poll_s) or NOTHING_TO_FEED
        return replace(order, released=refused + order.released)

    async def released(self, owner: int) -> FeedOrder:
        """A feeder with a full segment waits for memory, or for the end; the order has neither unit nor parts."""
        order = await self._room_signal.until(lambda: self._flow.release_order(owner), self._poll_s)
        return order or NOTHING_TO_FEED

    async def hand_in(self, owner: int, report: EncoderReport) -> tuple[Extent, ...]:
        """An encoder reports what it finished; it frees what comes back (parts whose lease was lost)."""
        refused = self._flow.hand_in(owner, report)
        self._plan_signal.notify()  # in arrival order a step is planned from what is ready
        self._wake_backbone()
        self._event_signal.notify()
        if report.rejections:
            self._wake_producers()  # what others had made of these samples is free again
        elif self._flow.may_lease_more(owner):
            self._lease_signal.notify()
        return refused

    async def lease(self, owner: int, encoder: str, free_nbytes: int) -> LeaseOrder:
        """An encoder waits for work; free_nbytes: what its segment can take now, before the order frees more."""
        asked = False

        def attempt() -> LeaseOrder | None:
            nonlocal asked
            is_fresh, asked = not asked, True
            return self._flow.lease_order(owner, encoder, free_nbytes, is_fresh)

        return await self._lease_signal.until(attempt, self._poll_s) or NOTHING_TO_LEASE

    # --- backbone -----------------------------------------------------------------------------------------------

    async def next_plan(self, unit_index: int) -> tuple[StepPlan | None, bool]:
        """Wait for a unit's plan. Returns (plan, False), (None, True) past the end, or (None, False) to ask again."""

        def attempt() -> tuple[StepPlan | None, bool] | None:
            plan = self._flow.plan_of(unit_index)
            past_end = plan is None and self._flow.is_past_end(unit_index)
            return (plan, past_end) if plan is not None or past_end else None

        self._flow.plan_of(unit_index)
        self._feed_signal.notify()  # in arrival order the window moves with the step that is asked for
        return await self._plan_signal.until(attempt, self._poll_s) or (None, False)

    async def begin(self, unit_index: int) -> bool:
        """A rank is about to run a unit; False means stop."""
        go = self._flow.begin(unit_index)
        self._wake_producers()  # a stopping run sizes what was begun, and nothing else
        if not go:
            self._plan_signal.notify()
            self._wake_backbone()
        return go

    async def locate(
        self, unit_index: int, slot: int | None, rank: int, read: tuple[int, ...] = (), limit: int = 1
    ) -> tuple[tuple[MicrobatchLocation, ...], bool]:
        """Wait until a microbatch is READY, and tell of those after it that are, up to ``limit``.

        slot None: any that the rank has not taken. read: slots of the unit that the rank has read since it last asked,
        which are released. Answers as ``next_plan``: ((), True) where a stop leaves the unit out, ((), False) to ask
        again.
        """

        def attempt() -> tuple[tuple[MicrobatchLocation, ...], bool] | None:
            if self._flow.is_past_end(unit_index):
                return (), True
            found: list[MicrobatchLocation] = []
            while len(found) < limit:
                location = self._flow.locate(unit_index, slot if slot is None else slot + len(found), rank)
                if location is None:
                    break
                found.append(location)
            return (tuple(found), False) if found else None

        if read:
            await self.release(unit_index, read, rank)
        return await self._locate_signals[rank].until(attempt, self._poll_s) or ((), False)

    async def release(self, unit_index: int, slots: tuple[int, ...], rank: int) -> None:
        """A rank has read microbatches, and needs their bytes in the pool no more."""
        if any([self._flow.release(unit_index, slot, rank) for slot in slots]):
            self._wake_backbone()
        self._room_signal.notify()
        self._lease_signal.notify()

    async def finish(self, report: RankReport, spans: tuple[Span, ...]) -> None:
        """A rank finished a unit."""
        if self._flow.finish(report, spans):
            self._wake_producers()
            self._event_signal.notify()

    async def checkpoint_written(self, step: int, rank: int, directory: str) -> None:
        """A rank wrote its share of a checkpoint."""
        if self._flow.checkpoint_written(step, rank, directory):
            self._event_signal.notify()

    async def describe_wait(self, unit_index: int, slot: int | None, rank: int) -> str:
        """Who waits for what."""
        return self._flow.describe_wait(unit_index, slot, rank)

    # --- driver -------------------------------------------------------------------------------------------------

    async def events(self) -> tuple[Event, ...]:
        """Wait for something to have happened."""

        def attempt() -> tuple[Event, ...] | None:
            return self._flow.take_events() if self._flow.has_news or self._events_ended else None

        return await self._event_signal.until(attempt, self._poll_s) or ()

    async def end_events(self) -> None:
        """Everything was reported: whoever waits for events gets what there is."""
        self._events_ended = True
        self._event_signal.notify()

    async def take_events(self) -> tuple[Event, ...]:
        """What happened since the last call, at once."""
        return self._flow.take_events()

    async def request_stop(self) -> None:
        """End the run after the step that is running and the evaluation that may follow it."""
        self._flow.request_stop()
        self._wake_producers()
        self._plan_signal.notify()

    def _wake_producers(self) -> None:
        self._feed_signal.notify()
        self._room_signal.notify()
        self._lease_signal.notify()

    def _wake_backbone(self) -> None:
        for signal in self._locate_signals.values():
            signal.notify()
