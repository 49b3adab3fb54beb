"""The coordinator answers all control messages of a run. It is a thin asynchronous shell round ``Flow``."""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

from flowtrain.actors.garbage import expect_many_objects, keep_imports
from flowtrain.actors.link import Answering
from flowtrain.actors.plan_processes import PlanProcesses
from flowtrain.actors.signals import Signal
from flowtrain.config.run import RunConfig
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.errors import OutdatedError
from flowtrain.flow.api import CoordinatorApi
from flowtrain.flow.build import build_flow
from flowtrain.flow.flow import Flow
from flowtrain.flow.steps import Elsewhere, Search
from flowtrain.observability.clocks import monotonic_clock_name
from flowtrain.scheduler.step_planner import StepPlanner
from flowtrain.search.configured import configured_search
from flowtrain.types.events import Event
from flowtrain.types.memory import SegmentExport
from flowtrain.types.messages import (
    EncoderReport,
    FeedOrder,
    FeedReport,
    FlowSettings,
    HandInReply,
    Joined,
    LeaseOrder,
    LocateReply,
    PlanReply,
    RankReport,
    RoomOrder,
    Span,
)
from flowtrain.types.plan import StepPlan
from flowtrain.types.samples import Rejection
from flowtrain.types.tracing import ClockReading, TraceSteps

NOTHING_TO_LEASE = LeaseOrder(None, (), stop=False)
NOTHING_TO_FEED = FeedOrder(None, (), (), stop=False)
NOTHING_TO_FREE = RoomOrder((), stop=False)
NO_PLAN_YET = PlanReply(None, is_past_end=False)
NOT_READY_YET = LocateReply((), is_past_end=False)


POLL_S = 5.0
RemakeFlow = Callable[[FlowSettings, Flow], Flow]
"""Builds the flow that takes over from an earlier one."""


def start_flow(config: RunConfig, model: ModelSpec, settings: FlowSettings, earlier: Flow | None = None) -> Flow:
    """Build a run's flow in its own process, and make the garbage collector run rarely there.

    earlier: as of ``build_flow``.
    """
    search = configured_search(config, model)
    elsewhere: Elsewhere | None = None
    if search is not None:
        planner = StepPlanner.from_config(config, settings.dp_size, settings.cost, search)
        elsewhere = earlier.steps.elsewhere if earlier is not None else _plan_processes(config, planner)
    flow = build_flow(config, model, settings, earlier, arrange=search, elsewhere=elsewhere)
    if earlier is None:  # otherwise that would be kept for good
        keep_imports()
        expect_many_objects()
    return flow


def _plan_processes(config: RunConfig, planner: StepPlanner) -> PlanProcesses | None:
    """On at most half of the cores; None on a single one, where the coordinator searches."""
    count = min(config.scheduler.lookahead_steps, len(os.sched_getaffinity(0)) // 2)
    return PlanProcesses(planner, count, config.pipeline.pipetune.arrival_limit_s) if count else None


class Coordinator(Answering, CoordinatorApi):
    """Answers feeders, encoders, backbone ranks and driver; all methods run on one event loop, one at a time.

    ``CoordinatorApi`` describes each method. Methods that wait answer after ``poll_s`` at the latest.

    make_flow: builds the Flow inside this process; it imports only pure rooms, so the actor starts fast.
    poll_s: longest wait of one question, in seconds.
    remake_flow: for ``rewind``; None: this run cannot go back.
    """

    def __init__(
        self, make_flow: Callable[[], Flow], poll_s: float = POLL_S, remake_flow: RemakeFlow | None = None
    ) -> None:
        self._flow = make_flow()
        self._remake_flow = remake_flow
        self._generation = 0
        self._poll_s = poll_s
        self._clock_name = monotonic_clock_name()
        self._feed_signal = Signal()
        self._room_signal = Signal()
        self._lease_signal = Signal()
        self._plan_signal = Signal()
        self._event_signal = Signal()
        self._events_ended = self._events_wanted = False
        self._holds_next = self._events_held = False
        self._locate_signals: defaultdict[int, Signal] = defaultdict(Signal)
        self._packed_plan: tuple[StepPlan | None, bytes] = None, b""
        self._followed: set[asyncio.Task[None]] = set()

    def _admit(self, generation: int | None) -> None:
        if generation is not None and generation != self._generation:
            raise OutdatedError(f"a rank of backbone {generation} asks, but backbone {self._generation} runs")

    def _packed(self, answer: object) -> bytes:
        if not isinstance(answer, PlanReply) or answer.plan is None:
            return super()._packed(answer)
        if answer.plan is not self._packed_plan[0]:  # it goes to every replica, and is the largest answer
            self._packed_plan = answer.plan, super()._packed(answer)
        return self._packed_plan[1]

    # --- pool processes -----------------------------------------------------------------------------------------

    async def join(self, name: str, node_id: str, feeder: int | None = None) -> Joined:
        """See ``CoordinatorApi``."""
        joined = self._flow.join(name, node_id, feeder)
        self._wake_producers()
        self._event_signal.notify()  # it may be back
        return joined

    async def publish(self, export: SegmentExport) -> None:
        """See ``CoordinatorApi``."""
        self._flow.members.publish(export)

    async def exports(self) -> tuple[SegmentExport, ...]:
        """See ``CoordinatorApi``."""
        return self._flow.members.exports()

    async def clock(self) -> ClockReading:
        """See ``CoordinatorApi``."""
        return ClockReading(self._clock_name, time.monotonic(), self._flow.log.epoch_s)

    async def process_lost(self, name: str, for_good: bool = False) -> None:
        """See ``CoordinatorApi``."""
        self._flow.process_lost(name, for_good)
        self._wake_producers()

    # --- feeders and encoders -----------------------------------------------------------------------------------

    async def feed(self, owner: int, report: FeedReport) -> FeedOrder:
        """See ``CoordinatorApi``; the order also frees parts that were reported too late."""
        refused = self._flow.feed(owner, report)
        self._follow_searches()
        self._plan_signal.notify()
        if report.unit is not None or report.remade:
            self._lease_signal.notify()
        self._wake_backbone()
        self._event_signal.notify()
        order = await self._feed_signal.until(lambda: self._flow.feed_order(owner), self._poll_s) or NOTHING_TO_FEED
        return replace(order, released=refused + order.released)

    async def wait_for_room(self, owner: int) -> RoomOrder:
        """See ``CoordinatorApi``."""
        return await self._room_signal.until(lambda: self._flow.room_order(owner), self._poll_s) or NOTHING_TO_FREE

    async def hand_in(self, owner: int, report: EncoderReport) -> HandInReply:
        """See ``CoordinatorApi``."""
        refused = self._flow.hand_in(owner, report)
        self._room_signal.notify()  # images that only this lease has kept are free
        self._plan_signal.notify()  # in arrival order a step is planned from what is ready
        self._wake_backbone()
        self._event_signal.notify()
        if report.rejections or report.returned is not None:
            self._wake_producers()  # the memory of their other parts is free again, or a lease is
        elif self._flow.may_lease_more(owner):
            self._lease_signal.notify()
        return HandInReply(refused)

    async def lease(self, owner: int, encoder: str, free_nbytes: int) -> LeaseOrder:
        """See ``CoordinatorApi``."""
        has_asked = False

        def attempt() -> LeaseOrder | None:
            nonlocal has_asked
            is_fresh, has_asked = not has_asked, True
            return self._flow.lease_order(owner, encoder, free_nbytes, is_fresh)

        return await self._lease_signal.until(attempt, self._poll_s) or NOTHING_TO_LEASE

    # --- backbone -----------------------------------------------------------------------------------------------

    async def begin(self, unit: int) -> bool:
        """See ``CoordinatorApi``."""
        is_first = not self._flow.steps.has_begun(unit)
        go = self._flow.steps.begin(unit)
        if is_first:
            self._wake_producers()  # a stopping run sizes only units that were begun
        if not go:
            self._plan_signal.notify()
            self._wake_backbone()
        return go

    async def next_plan(self, unit: int, dp_rank: int) -> PlanReply:
        """See ``CoordinatorApi``."""
        flow = self._flow  # a rank that waits while the run goes back asks nothing of the new flow

        def attempt() -> PlanReply | None:
            reply = flow.plan_reply(unit, dp_rank)
            self._follow_searches()
            return reply

        flow.plan_of(unit)
        self._feed_signal.notify()  # in arrival order the window moves with the step that a replica asks for
        return await self._plan_signal.until(attempt, self._poll_s) or NO_PLAN_YET

    def _follow_searches(self) -> None:
        for search in self._flow.steps.take_searches():
            task = asyncio.create_task(self._follow(self._flow, search))
            self._followed.add(task)
            task.add_done_callback(self._followed.discard)

    async def _follow(self, flow: Flow, search: Search) -> None:
        """Take in a plan when its search ends, or its unit waits no longer."""
        ended = asyncio.wrap_future(search.future)
        ended.add_done_callback(lambda future: future.cancelled() or future.exception())  # the flow reads it
        await asyncio.wait([ended], timeout=search.limit_s)
        try:
            flow.search_ended(search)
        finally:  # what a plan raises is raised again to the replica that asks for it
            self._plan_signal.notify()
            self._lease_signal.notify()
            self._wake_backbone()
            self._event_signal.notify()

    async def locate(
        self, unit: int, slot: int | None, dp_rank: int, read: tuple[int, ...] = (), limit: int = 1
    ) -> LocateReply:
        """See ``CoordinatorApi``."""
        if read:
            await self.release(unit, read, dp_rank)
        flow = self._flow  # as in ``next_plan``

        def attempt() -> LocateReply | None:
            return flow.locate_reply(unit, slot, dp_rank, limit)

        return await self._locate_signals[dp_rank].until(attempt, self._poll_s) or NOT_READY_YET

    async def release(self, unit: int, slots: tuple[int, ...], dp_rank: int, ends: bool = False) -> PlanReply:
        """See ``CoordinatorApi``."""
        self._flow.microbatches.release(unit, slots, dp_rank)
        if self._flow.microbatches.whole_units:
            self._wake_backbone()  # of a unit that lost parts, the rest may be complete now
        self._room_signal.notify()
        if self._flow.parts.leases.has_line:  # otherwise encoders wait for batches, not for memory
            self._lease_signal.notify()
        plan = self._flow.steps.plan_of(unit + 1) if ends else None
        return PlanReply(plan.for_replica(dp_rank), is_past_end=False) if plan is not None else NO_PLAN_YET

    async def reject(self, dp_rank: int, rejections: tuple[Rejection, ...]) -> None:
        """See ``CoordinatorApi``."""
        self._flow.reject(dp_rank, rejections)
        self._room_signal.notify()
        self._event_signal.notify()

    async def finish(self, reports: tuple[RankReport, ...], spans: tuple[Span, ...]) -> bool:
        """See ``CoordinatorApi``."""
        if self._flow.finish(reports, spans):
            self._wake_producers()
            self._event_signal.notify()
        return await self.begin(reports[0].unit + 1)

    async def checkpoint_written(self, step: int, directory: str, duration_s: float = 0.0) -> None:
        """See ``CoordinatorApi``."""
        self._flow.log.checkpoint_written(step, directory, duration_s)
        self._event_signal.notify()

    async def checkpoint_failed(self, step: int, reason: str) -> None:
        """See ``CoordinatorApi``."""
        self._flow.log.checkpoint_failed(step, reason)
        self._event_signal.notify()

    async def snapshot_kept(self, step: int) -> None:
        """See ``CoordinatorApi``."""
        self._flow.log.snapshot_kept(step)
        self._event_signal.notify()

    async def describe_wait(self, unit: int, slot: int | None, dp_rank: int) -> str:
        """See ``CoordinatorApi``."""
        return self._flow.describe_wait(unit, slot, dp_rank)

    # --- driver -------------------------------------------------------------------------------------------------

    async def events(self) -> tuple[Event, ...]:
        """See ``CoordinatorApi``."""

        def attempt() -> tuple[Event, ...] | None:
            log = self._flow.log
            if self._events_held or not (log.has_news or self._events_ended or self._events_wanted):
                return None
            self._events_held, self._holds_next = self._holds_next, False
            self._events_wanted = False
            return log.take()

        return await self._event_signal.until(attempt, self._poll_s) or ()

    async def flush_events(self, hold: bool = False) -> None:
        """See ``CoordinatorApi``."""
        self._events_wanted = True
        self._holds_next = hold
        self._event_signal.notify()

    async def end_events(self) -> None:
        """See ``CoordinatorApi``."""
        self._events_ended = True
        self._event_signal.notify()

    async def rewind(self, settings: FlowSettings, gone: tuple[str, ...]) -> None:
        """See ``CoordinatorApi``."""
        assert self._remake_flow is not None, "this run cannot go back"
        for name in gone:
            self._flow.process_lost(name)
        self._flow = self._remake_flow(settings, self._flow)
        self._generation += 1
        self._events_held = False
        self._packed_plan = None, b""
        self._wake_producers()
        self._plan_signal.notify()
        self._wake_backbone()
        self._event_signal.notify()

    async def trace(self, num_steps: int) -> TraceSteps:
        """See ``CoordinatorApi``."""
        return self._flow.trace.ask_for(num_steps)

    async def request_stop(self) -> None:
        """See ``CoordinatorApi``."""
        self._flow.steps.request_stop()
        self._wake_producers()
        self._plan_signal.notify()

    def _wake_producers(self) -> None:
        self._feed_signal.notify()
        self._room_signal.notify()
        self._lease_signal.notify()

    def _wake_backbone(self) -> None:
        for signal in self._locate_signals.values():
            signal.notify()
