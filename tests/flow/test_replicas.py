"""What a replica reads: its order by arrival, what it may release, what it leaves out, and its one report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowtrain.errors import PoolError
from flowtrain.flow.flow import Flow
from flowtrain.flow.report import of_replica
from flowtrain.types.events import UnitDone
from flowtrain.types.messages import EncoderReport
from flowtrain.types.plan import StepPlan, Unit, UnitKind
from tests.flow.simulation import (
    VISION,
    SimulatedEncoder,
    SimulatedFeeder,
    build_flow,
    located,
    rejection_of,
    report_of,
    sample_of,
)


class World:
    """A flow with one replica, a feeder, and an encoder that the test drives."""

    def __init__(self, dp_size: int = 1) -> None:
        self.flow: Flow = build_flow(dp_size=dp_size, lookahead=2)
        self.feeder = SimulatedFeeder(self.flow.join("feeder-0", "node", 0).process_index)
        self.encoder = SimulatedEncoder(self.flow.join("encoder-0", "node").process_index, 1 << 16)

    def feed(self) -> None:
        order = self.flow.feed_order(self.feeder.index)
        assert order is not None and order.unit is not None
        self.flow.feed(self.feeder.index, self.feeder.make(order.unit, order.remake))

    def encode(self, num_batches: int = 100) -> None:
        for _ in range(num_batches):
            self.encoder.take(self.flow.lease_order(self.encoder.index, VISION, self.encoder.arena.available_nbytes))
            if not self.encoder.work:
                return
            self.flow.hand_in(self.encoder.index, self.encoder.encode())

    def plan(self, unit: int = 0) -> StepPlan:
        plan = self.flow.plan_of(unit)
        assert plan is not None and plan.num_slots > 1
        return plan

    def slot(self, unit: int, slot: int | None, dp_rank: int) -> int | None:
        location = located(self.flow, unit, slot, dp_rank)
        return location.slot if location is not None else None

    def read_all(self, unit: int, dp_rank: int) -> None:
        for slot in range(self.plan(unit).num_slots):
            assert self.slot(unit, slot, dp_rank) == slot
            self.flow.microbatches.release(unit, (slot,), dp_rank)


def test_bytes_stay_until_their_replica_has_read_them() -> None:
    world = World()
    world.feed()
    world.encode()
    world.flow.room_order(world.feeder.index)  # the text of what was rejected
    assert world.slot(0, 0, 0) == 0
    assert world.flow.room_order(world.feeder.index) is None
    world.flow.microbatches.release(0, (0,), 0)
    order = world.flow.room_order(world.feeder.index)
    assert order is not None and order.released


def test_a_microbatch_is_released_once_by_the_replica_that_knows_where_it_lies() -> None:
    world = World(dp_size=2)
    world.feed()
    world.encode()
    located(world.flow, 0, 0, 0)
    with pytest.raises(PoolError, match="slot 0 cannot be released by replica 1: the replica does not know where"):
        world.flow.microbatches.release(0, (0,), 1)
    world.flow.microbatches.release(0, (0,), 0)
    with pytest.raises(PoolError, match="slot 0 cannot be released by replica 0: the replica has read it before"):
        world.flow.microbatches.release(0, (0,), 0)


def test_by_arrival_a_replica_takes_what_is_ready_each_once() -> None:
    world = World()
    world.feed()
    ready_alone = world.flow.microbatches._units[0].ready_slots[0].copy()
    world.encode(1)
    first = world.slot(0, None, 0)
    assert first is not None and first <= min(ready_alone, default=first)
    world.encode()
    second = world.slot(0, None, 0)
    assert second is not None and second != first
    assert world.slot(0, first, 0) == first, "asking again for what it has takes nothing new"
    rest = [world.slot(0, None, 0) for _ in range(world.plan().num_slots - 2)]
    assert {first, second, *rest} == set(range(world.plan().num_slots))
    assert world.slot(0, None, 0) is None


def test_each_replica_has_an_order_of_its_own() -> None:
    world = World(dp_size=2)
    world.feed()
    world.encode()
    slots = list(range(world.plan().num_slots))
    assert [world.slot(0, None, 0) for _ in slots] == slots
    assert [world.slot(0, None, 1) for _ in slots] == slots
    assert located(world.flow, 0, 0, 1).dp_rank == 1  # type: ignore[union-attr]  # it is there


@pytest.mark.parametrize("arrival", [False, True])
def test_a_replica_reads_ahead_of_a_unit_that_another_still_reads(arrival: bool) -> None:
    world = World(dp_size=2)
    for _ in range(2):
        world.feed()
        world.encode()
    world.read_all(0, 0)
    assert located(world.flow, 1, None if arrival else 0, 0) is not None


def test_a_microbatch_that_was_lost_comes_again_without_the_samples_that_are_bad_now() -> None:
    world = World()
    world.feed()
    world.encode()
    slot, position = next(
        (slot, sample.position)
        for slot, row in enumerate(world.plan().slots)
        for sample in row[0].samples
        if sample_of(sample.position).num_vision_tokens
    )
    assert world.slot(0, slot, 0) == slot
    world.flow.process_lost("encoder-0")
    world.encoder = SimulatedEncoder(world.flow.join("encoder-0", "node").process_index, 1 << 16)
    world.flow.hand_in(world.encoder.index, EncoderReport(rejections=(rejection_of(position),)))
    world.encode()
    again = located(world.flow, 0, slot, 0)
    assert again is not None and position in again.rejected


def test_a_replica_gets_what_its_next_microbatch_waits_for() -> None:
    world = World()
    world.feed()
    assert "slot 0, replica 0" in world.flow.describe_wait(0, None, 0)
    world.encode()
    for _ in range(2):
        located(world.flow, 0, None, 0)
    assert "slot 2, replica 0" in world.flow.describe_wait(0, None, 0)
    assert "slot 1, replica 0" in world.flow.describe_wait(0, 1, 0)


def test_a_unit_ends_when_every_replica_is_done_with_it() -> None:
    world = World(dp_size=2)
    world.feed()
    world.encode()
    for dp_rank in range(2):
        world.read_all(0, dp_rank)
    world.flow.log.take()
    unit = world.plan().unit
    assert not world.flow.finish((report_of(unit, 1), report_of(unit, 1)), ()), "of two ranks"
    assert world.flow.finish((report_of(unit, 0),), ())
    (done,) = (event for event in world.flow.log.take() if isinstance(event, UnitDone))
    assert [report.dp_rank for report in done.reports] == [0, 1]


def test_a_replicas_times_are_those_of_its_slowest_rank() -> None:
    report = report_of(Unit(0, UnitKind.TRAIN, 1, 0, 4), 0)
    first = replace(
        report, started_s=1.0, finished_s=5.0, starved_s=0.5, fetch_s=0.1, microbatch_s=(2.0, 1.0), read_nbytes=5
    )
    last = replace(
        report, started_s=2.0, finished_s=7.0, starved_s=0.1, fetch_s=0.3, microbatch_s=(1.0, 3.0), read_nbytes=7
    )
    merged = of_replica([last, first])
    assert merged == replace(
        report, started_s=1.0, finished_s=7.0, starved_s=0.5, fetch_s=0.3, microbatch_s=(2.0, 3.0), read_nbytes=12
    )
    assert of_replica([replace(report, microbatch_s=())]).microbatch_s == (), "an evaluation has none"
