"""Long polls answer as soon as their condition may have changed, and with nothing when their time is up."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from flowtrain.actors.coordinator import Coordinator
from flowtrain.actors.signals import Signal
from flowtrain.errors import ConfigError, OutdatedError, PoolError
from flowtrain.flow.api import CoordinatorApi
from flowtrain.flow.flow import Flow
from flowtrain.observability.clocks import monotonic_clock_name
from flowtrain.types.evaluation import EvalRounds
from flowtrain.types.events import Rejoined, SpansRecorded, UnitDone
from flowtrain.types.memory import Extent, Tier
from flowtrain.types.messages import (
    EncoderReport,
    FeedOrder,
    FeedReport,
    LeaseOrder,
    LocateReply,
    MicrobatchLocation,
    PartReady,
    PlanReply,
)
from flowtrain.types.samples import IMAGES_PART, TEXT_PART, SamplerState
from flowtrain.types.tracing import TraceSteps
from tests.flow.searching import ByHand, backwards
from tests.flow.simulation import (
    ENCODER_NBYTES,
    LEASE_TIMEOUT_S,
    SPACE,
    VISION,
    SimulatedEncoder,
    SimulatedFeeder,
    build_flow,
    rejection_of,
    report_of,
    sample_of,
)

FOREVER_S = 1000.0
HANG_S = 20.0

Scenario = Callable[["World"], Awaitable[None]]


class World:
    """A coordinator with a feeder and an encoder that have joined it."""

    def __init__(self, flow: Flow, poll_s: float) -> None:
        self.coordinator = Coordinator(lambda: flow, poll_s)

    async def join(self) -> None:
        feeder = await self.coordinator.join("feeder-0", "node", 0)
        encoder = await self.coordinator.join("encoder-0", "node")
        self.feeder = SimulatedFeeder(feeder.process_index)
        self.encoder = SimulatedEncoder(encoder.process_index, 1 << 16)

    async def feed(self, report: FeedReport | None = None) -> FeedOrder:
        order = await soon(self.coordinator.feed(self.feeder.index, report or FeedReport()))
        self.feeder.free(order.released)
        return order

    async def size_next(self) -> None:
        """Size the next unit; do not wait for the order after it."""
        order = await self.feed()
        assert order.unit is not None
        report = self.feeder.make(order.unit, order.remake)
        task = asyncio.create_task(self.coordinator.feed(self.feeder.index, report))
        await settle()
        task.cancel()

    async def lease(self) -> LeaseOrder:
        return await self.coordinator.lease(self.encoder.index, VISION, self.encoder.arena.available_nbytes)

    async def encode_all(self) -> None:
        flow = self.coordinator._flow
        while (order := flow.lease_order(self.encoder.index, VISION, 1 << 16)) is not None:
            self.encoder.take(order)
            if not self.encoder.work:
                return
            self.encoder.free((await self.coordinator.hand_in(self.encoder.index, self.encoder.encode())).refused)

    async def run(self, unit: int, begins_next: bool = True) -> None:
        """Run a unit on the only replica. begins_next: it asks for the next one with its report."""
        assert await self.coordinator.begin(unit)
        plan = (await soon(self.coordinator.next_plan(unit, 0))).plan
        assert plan is not None
        for slot in range(len(plan.slots)):
            (location,) = (await soon(self.coordinator.locate(unit, slot, 0))).locations
            await self.coordinator.release(unit, (location.slot,), 0)
        finish = self.coordinator.finish if begins_next else async_finish(self.coordinator._flow)
        await finish((report_of(plan.unit, 0),), ())


def async_finish(flow: Flow) -> Callable[..., Awaitable[Any]]:
    async def finish(*args: Any) -> None:
        flow.finish(*args)

    return finish


async def settle() -> None:
    """Let all tasks run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def soon(awaitable: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(awaitable, HANG_S)


async def waiting(awaitable: Awaitable[Any]) -> asyncio.Task[Any]:
    """Start a call that must not answer yet."""
    task = asyncio.ensure_future(awaitable)
    await settle()
    assert not task.done(), "there was nothing to answer with"
    return task


def play(scenario: Scenario, poll_s: float = FOREVER_S, **flow_options: Any) -> None:
    async def whole() -> None:
        world = World(build_flow(**{"dp_size": 1, **flow_options}), poll_s)
        await world.join()
        await scenario(world)

    asyncio.run(whole())


def test_a_sized_unit_wakes_encoders_and_replicas() -> None:
    async def scenario(world: World) -> None:
        lease = await waiting(world.lease())
        plan = await waiting(world.coordinator.next_plan(0, 0))
        await world.size_next()
        assert (await soon(lease)).lease is not None
        assert (await soon(plan)).plan.unit.index == 0

    play(scenario)


def test_a_part_that_is_ready_wakes_the_replica() -> None:
    async def scenario(world: World) -> None:
        await world.size_next()
        location = await waiting(world.coordinator.locate(0, 0, 0))
        await world.encode_all()
        reply = await soon(location)
        (found,), is_past_end = reply.locations, reply.is_past_end
        assert isinstance(found, MicrobatchLocation) and is_past_end is False

    play(scenario)


@pytest.mark.parametrize("arrival", [False, True])
def test_a_replica_gets_as_many_as_it_has_room_for_and_releases_with_the_question(arrival: bool) -> None:
    async def scenario(world: World) -> None:
        await world.size_next()
        await world.encode_all()
        plan = (await soon(world.coordinator.next_plan(0, 0))).plan
        assert plan is not None and plan.num_slots == 3
        slots = [None, None, None] if arrival else [0, 1, 2]
        first = (await soon(world.coordinator.locate(0, slots[0], 0, (), 2))).locations
        assert [location.slot for location in first] == [0, 1]
        rest = (await soon(world.coordinator.locate(0, slots[2], 0, (0, 1), 2))).locations
        assert [location.slot for location in rest] == [2]
        released = await soon(world.coordinator.wait_for_room(world.feeder.index))
        assert released.released
        await world.coordinator.release(0, (2,), 0)
        await world.coordinator.finish((report_of(plan.unit, 0),), ())

    play(scenario, arrival=arrival)


def test_in_arrival_order_a_part_that_is_ready_wakes_replicas_that_wait_for_a_plan() -> None:
    async def scenario(world: World) -> None:
        await world.size_next()
        plan = await waiting(world.coordinator.next_plan(0, 0))
        said = await world.coordinator.describe_wait(0, None, 0)
        assert "unit 0 is not planned yet, which waits for 3 parts: vision of position 0" in said
        assert said.endswith("feeders size unit 1 next")
        await world.encode_all()
        assert (await soon(plan)).plan.unit.chosen == (0, 1, 2, 3)

    play(scenario, arrival=True)


def test_a_plan_that_is_searched_wakes_encoders_and_replicas_when_it_is_there() -> None:
    elsewhere = ByHand()

    async def scenario(world: World) -> None:
        await world.size_next()
        lease = await waiting(world.lease())
        plan = await waiting(world.coordinator.next_plan(0, 0))
        elsewhere.end(0)
        assert (await soon(lease)).lease is not None
        assert (await soon(plan)).plan.unit.index == 0

    play(scenario, arrange=backwards, elsewhere=elsewhere)


def test_a_search_that_takes_too_long_holds_no_step_by_arrival() -> None:
    elsewhere = ByHand(limit_s=0.01)

    async def scenario(world: World) -> None:
        await world.size_next()
        await world.encode_all()
        assert (await soon(world.coordinator.next_plan(0, 0))).plan.unit.chosen == (0, 1, 2, 3)
        elsewhere.end(0)
        await settle()

    play(scenario, arrival=True, arrange=backwards, elsewhere=elsewhere)


def test_what_planning_raises_reaches_who_asks() -> None:
    elsewhere, calls = ByHand(), []

    def raising(*args: Any) -> Any:
        calls.append(args)
        raise ConfigError("no such plan")

    async def scenario(world: World) -> None:
        await world.size_next()
        plan = await waiting(world.coordinator.next_plan(0, 0))
        elsewhere.fail(0)
        with pytest.raises(ConfigError, match="no such plan"):
            await soon(plan)
        assert calls

    play(scenario, arrange=raising, elsewhere=elsewhere)


def test_a_finished_unit_wakes_the_feeder_and_the_driver() -> None:
    async def scenario(world: World) -> None:
        for _ in range(2):
            await world.size_next()
        await world.encode_all()
        world.coordinator._flow.log.take()
        world.coordinator._flow.room_order(world.feeder.index)  # the text of samples that were found bad
        feed = await waiting(world.coordinator.feed(world.feeder.index, FeedReport()))
        events = await waiting(world.coordinator.events())
        await world.run(0)
        assert [type(event) for event in await soon(events)] == [UnitDone]
        order = await soon(feed)
        assert order.released or order.unit is not None

    play(scenario)


def test_released_memory_wakes_a_feeder_without_room() -> None:
    async def scenario(world: World) -> None:
        await world.size_next()
        await world.encode_all()
        released = await waiting(world.coordinator.wait_for_room(world.feeder.index))
        assert await world.coordinator.begin(0)
        await soon(world.coordinator.locate(0, 0, 0))
        await world.coordinator.release(0, (0,), 0)
        order = await soon(released)
        assert order.released and not order.stop

    play(scenario)


@pytest.mark.parametrize("why", ["it lies in hbm", "it was refused"])
def test_room_that_a_report_leaves_wakes_the_encoder_that_waits_for_it(why: str) -> None:
    now = 0.0

    async def scenario(world: World) -> None:
        nonlocal now
        for _ in range(6):
            await world.size_next()
        coordinator, index = world.coordinator, world.encoder.index
        world.encoder = encoder = SimulatedEncoder(index, ENCODER_NBYTES)
        while (order := coordinator._flow.lease_order(index, VISION, encoder.arena.available_nbytes)) is not None:
            encoder.take(order)
        lease = await waiting(world.lease())
        if why == "it was refused":
            now += LEASE_TIMEOUT_S
            other = await coordinator.join("encoder-1", "node")
            order = await soon(coordinator.lease(other.process_index, VISION, 1 << 16))
            assert order.lease.batch == encoder.work[0][0].batch, "it was taken back"
            report = encoder.encode()
        else:
            report = in_hbm(encoder)
        refused = (await coordinator.hand_in(index, report)).refused
        assert not report.rejections and bool(refused) == (why == "it was refused")
        encoder.free(refused)
        order = await soon(lease)
        assert order.lease is None and not order.stop
        assert (await soon(world.lease())).lease is not None

    play(scenario, poll_s=60.0, num_steps=9, lookahead=8, clock=lambda: now)


def in_hbm(encoder: SimulatedEncoder) -> EncoderReport:
    """Return an encoder's report of its first lease, all of which lies in device memory."""
    lease, hold = encoder.work.pop(0)
    encoder.arena.unhold(hold)
    offsets = range(0, 1 << 20, 1 << 10)
    ready = [
        PartReady(position, VISION, lease.epoch, (Extent(SPACE.gva(Tier.HBM, encoder.index, offset), nbytes),))
        for offset, position in zip(offsets, lease.needed, strict=False)
        for nbytes in [sample_of(position).parts[1].nbytes]
    ]
    return EncoderReport(tuple(ready), (), encoder.stats)


def test_a_late_rejection_wakes_those_whose_memory_it_frees() -> None:
    async def scenario(world: World) -> None:
        await world.size_next()
        released = await waiting(world.coordinator.wait_for_room(world.feeder.index))
        await world.coordinator.hand_in(world.encoder.index, EncoderReport(rejections=(rejection_of(2),)))
        assert (await soon(released)).released

    play(scenario)


def test_a_death_wakes_the_other_producers() -> None:
    async def scenario(world: World) -> None:
        await world.size_next()
        flow = world.coordinator._flow
        while flow.lease_order(world.encoder.index, VISION, 1 << 16) is not None:
            pass  # all batches are leased to the one that dies
        other = await world.coordinator.join("encoder-1", "node")
        lease = await waiting(world.coordinator.lease(other.process_index, VISION, 1 << 16))
        await world.coordinator.process_lost("encoder-0")
        assert (await soon(lease)).lease is not None

    play(scenario)


def test_a_stop_ends_every_wait() -> None:
    async def scenario(world: World) -> None:
        await world.size_next()
        await world.encode_all()
        await world.run(0, begins_next=False)
        for _ in range(2):
            await world.size_next()
        coordinator, feeder = world.coordinator, world.feeder.index
        coordinator._flow.room_order(feeder)  # what unit 0 released is given back
        world.encoder.take(coordinator._flow.lease_order(world.encoder.index, VISION, 0))
        feed = await waiting(coordinator.feed(feeder, FeedReport()))
        lease = await waiting(coordinator.lease(world.encoder.index, VISION, 0))
        location = await waiting(coordinator.locate(1, 0, 0))
        plan = await waiting(coordinator.next_plan(3, 0))
        full = await waiting(coordinator.wait_for_room(feeder))
        await coordinator.request_stop()
        assert not await coordinator.begin(1)
        assert await soon(location) == LocateReply((), is_past_end=True)
        assert await soon(plan) == PlanReply(None, is_past_end=True)
        assert (await soon(lease)).stop and (await soon(feed)).stop and (await soon(full)).stop

    play(scenario, num_steps=9)


def test_a_unit_begun_while_stopping_is_handed_to_the_feeder() -> None:
    async def scenario(world: World) -> None:
        await world.size_next()
        await world.encode_all()
        await world.coordinator.begin(0)
        await world.coordinator.request_stop()
        feed = await waiting(world.coordinator.feed(world.feeder.index, FeedReport()))
        await world.run(0, begins_next=False)
        await settle()
        assert not feed.done(), "memory alone is no reason to answer"
        assert await world.coordinator.begin(1), "an evaluation follows the step"
        order = await soon(feed)
        assert order.unit.kind == "eval" and order.released

    play(scenario, evaluations=(EvalRounds(1, 2),))


def test_waits_end_with_nothing_when_their_time_is_up() -> None:
    async def scenario(world: World) -> None:
        coordinator = world.coordinator
        order = await soon(world.lease())
        assert order.lease is None and not order.stop
        assert await soon(coordinator.next_plan(0, 0)) == PlanReply(None, is_past_end=False)
        assert await soon(coordinator.locate(0, 0, 0)) == LocateReply((), is_past_end=False)
        assert await soon(coordinator.events()) == ()
        order = await soon(coordinator.wait_for_room(world.feeder.index))
        assert not order.released and not order.stop
        for _ in range(2):
            await world.size_next()
        order = await world.feed()
        assert order.unit is None and not order.stop

    play(scenario, poll_s=0.01)


def test_parts_that_were_produced_again_in_vain_come_back_to_be_freed() -> None:
    async def scenario(world: World) -> None:
        await world.size_next()
        successor = SimulatedFeeder((await world.coordinator.join("feeder-0", "node", 0)).process_index)
        order = await soon(world.coordinator.feed(successor.index, FeedReport()))
        assert [lost.ref.position for lost in order.remake] == [0, 1, 2, 3]
        report = successor.make(None, order.remake)
        await world.coordinator.hand_in(world.encoder.index, EncoderReport(rejections=(rejection_of(2),)))
        order = await soon(world.coordinator.feed(successor.index, report))
        in_vain = [ready for ready in report.remade if ready.position == 2]
        assert [ready.part for ready in in_vain] == [IMAGES_PART, TEXT_PART]
        assert order.released == tuple(extent for ready in in_vain for extent in ready.extents)

    play(scenario)


def test_no_call_waits_for_events_once_they_ended() -> None:
    async def scenario(world: World) -> None:
        events = await waiting(world.coordinator.events())
        await world.coordinator.end_events()
        assert await soon(events) == ()
        await world.size_next()
        world.coordinator._flow._reject((rejection_of(1),))
        assert len(await soon(world.coordinator.events())) == 1
        assert await soon(world.coordinator.events()) == ()

    play(scenario)


def test_a_plan_past_the_end_is_reported_as_none() -> None:
    async def scenario(world: World) -> None:
        await world.size_next()
        assert await soon(world.coordinator.next_plan(1, 0)) == PlanReply(None, is_past_end=True)

    play(scenario, num_steps=1)


@pytest.mark.parametrize("num_waiters", [1, 3])
def test_a_signal_between_two_attempts_is_not_lost(num_waiters: int) -> None:
    async def whole() -> None:
        signal, available = Signal(), 0

        def attempt() -> int | None:
            nonlocal available
            if not available:
                return None
            available -= 1
            return 1

        async def produce() -> None:
            nonlocal available
            for _ in range(num_waiters * 5):
                available += 1
                signal.notify()
                await asyncio.sleep(0)

        async def consume() -> int:
            return sum([await signal.until(attempt, FOREVER_S) or 0 for _ in range(5)])

        counts = await soon(asyncio.gather(*[consume() for _ in range(num_waiters)], produce()))
        assert counts[:-1] == [5] * num_waiters

    asyncio.run(whole())


def test_a_packed_question_has_the_answer_of_its_method() -> None:
    async def scenario(world: World) -> None:
        async def ask(name: str, *args: Any, **kwargs: Any) -> Any:
            return pickle.loads(await soon(world.coordinator.answer(pickle.dumps((name, args, kwargs, None)))))

        assert await ask("next_plan", 7, 0) == PlanReply(None, is_past_end=False)
        for _ in range(2):
            await world.size_next()
        for unit in (0, 1, 0):
            assert await ask("next_plan", unit, 0) == await world.coordinator.next_plan(unit, 0)
        assert await ask("begin", unit=0) is True
        with pytest.raises(PoolError, match="cannot be released"):
            await ask("release", 0, (0,), 0)

    play(scenario, poll_s=0.05)


def test_the_end_of_a_unit_brings_the_next_plan_and_whether_to_go_on() -> None:
    async def scenario(world: World) -> None:
        for _ in range(2):
            await world.size_next()
        await world.encode_all()
        coordinator = world.coordinator
        assert await coordinator.begin(0)
        plan = (await soon(coordinator.next_plan(0, 0))).plan
        for slot in range(plan.num_slots):
            await soon(coordinator.locate(0, slot, 0))
            ends = slot == plan.num_slots - 1
            reply = await coordinator.release(0, (slot,), 0, ends)
            assert reply.plan is (coordinator._flow.steps.plan_of(1) if ends else None)
        await coordinator.request_stop()
        assert await coordinator.finish((report_of(plan.unit, 0),), ()) is False

    play(scenario)


def test_only_the_first_that_begins_a_unit_wakes_producers() -> None:
    async def scenario(world: World) -> None:
        for _ in range(2):
            await world.size_next()
        woken = []
        world.coordinator._wake_producers = lambda: woken.append(1)
        assert [await world.coordinator.begin(unit) for unit in (0, 0, 1, 0, 1)] == [True] * 5
        assert len(woken) == 2

    play(scenario)


def test_the_run_goes_back_under_everybodys_hands() -> None:
    async def scenario(world: World) -> None:
        coordinator, flow = world.coordinator, world.coordinator._flow
        coordinator._remake_flow = lambda settings, earlier: build_flow(dp_size=1, earlier=earlier)
        for _ in range(2):
            await world.size_next()
        lease = await world.lease()
        world.encoder.take(lease)
        feed = await waiting(coordinator.feed(world.feeder.index, FeedReport()))
        late = await waiting(coordinator.locate(0, 0, 0))
        question = pickle.dumps(("begin", (0,), {}, 0))
        assert pickle.loads(await coordinator.answer(question)) is True
        await coordinator.rewind(None, ())  # type: ignore[arg-type]  # the flow above needs none
        assert coordinator._flow is not flow
        with pytest.raises(OutdatedError, match="a rank of backbone 0 asks, but backbone 1 runs"):
            await coordinator.answer(question)
        order = await soon(feed)
        assert order.starts_at == SamplerState(0) and order.unit is None
        world.feeder.free(order.released)
        assert world.feeder.arena.used_nbytes == 0, "all that was sized is sized again"
        refused = (await coordinator.hand_in(world.encoder.index, world.encoder.encode())).refused
        world.encoder.free(refused)
        assert refused and world.encoder.arena.used_nbytes == 0
        late.cancel()
        await world.size_next()
        await world.encode_all()
        await world.run(0)

    play(scenario)


def test_events_are_answered_at_once_when_they_are_wanted() -> None:
    async def scenario(world: World) -> None:
        events = await waiting(world.coordinator.events())
        await world.coordinator.flush_events()
        assert await soon(events) == ()
        await world.coordinator.flush_events()
        assert await soon(world.coordinator.events()) == ()
        await world.coordinator.flush_events(hold=True)
        assert await soon(world.coordinator.events()) == ()
        world.coordinator._flow.log.checkpoint_written(1, "x")
        (await waiting(world.coordinator.events())).cancel()

    play(scenario)


def test_every_question_has_its_answer() -> None:
    """A method that only the Protocol has would answer None."""
    questions = [name for name, member in vars(CoordinatorApi).items() if inspect.iscoroutinefunction(member)]
    assert len(questions) > 10 and set(questions) <= set(vars(Coordinator))


def test_its_clock_is_the_runs_clock_and_steps_are_traced_on_demand() -> None:
    async def scenario(world: World) -> None:
        before_s = time.monotonic()
        reading = await world.coordinator.clock()
        assert before_s <= reading.now_s <= time.monotonic() and reading.clock == monotonic_clock_name()
        assert abs(reading.now_s + reading.epoch_s - time.time()) < 60.0, "it is a time since the Unix epoch"
        assert (await world.coordinator.clock()).epoch_s == reading.epoch_s
        assert await world.coordinator.trace(2) == TraceSteps(1, 2)
        await world.size_next()
        world.coordinator._flow._reject((rejection_of(1),))
        events = await soon(world.coordinator.events())
        assert any(isinstance(event, SpansRecorded) for event in events)

    play(scenario)


def test_the_driver_hears_at_once_that_a_process_is_back() -> None:
    async def scenario(world: World) -> None:
        await world.coordinator.process_lost("encoder-0")
        events = await waiting(world.coordinator.events())
        await world.coordinator.join("encoder-0", "node")
        (event,) = await soon(events)
        assert isinstance(event, Rejoined) and event.name == "encoder-0"

    play(scenario)
