"""What the ranks of a replica share: the order of their microbatches, the rejected samples, and one report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowtrain.errors import DataError, PoolError
from flowtrain.flow.flow import Flow
from flowtrain.flow.report import of_replicas
from flowtrain.types.events import CheckpointWritten, UnitDone
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

NUM_MEMBERS = 2


class World:
    """A flow with one replica of two ranks, a feeder, and an encoder that the test drives."""

    def __init__(self, **options: object) -> None:
        self.flow: Flow = build_flow(**{"dp_size": 1, "replica_size": NUM_MEMBERS, "lookahead": 2, **options})  # type: ignore[arg-type]
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

    def slot(self, unit: int, slot: int | None, rank: int) -> int | None:
        location = located(self.flow, unit, slot, rank)
        return location.slot if location is not None else None

    def read_all(self, unit: int, rank: int) -> None:
        for slot in range(self.plan(unit).num_slots):
            assert self.slot(unit, slot, rank) == slot
            self.flow.microbatches.release(unit, (slot,), rank)


def test_bytes_stay_until_every_rank_of_the_replica_has_read_them() -> None:
    world = World()
    world.feed()
    world.encode()
    world.flow.room_order(world.feeder.index)  # the text of what was rejected
    for rank in (1, 0):
        assert world.flow.room_order(world.feeder.index) is None
        assert world.slot(0, 0, rank) == 0
        assert not world.flow.microbatches.release(0, (0,), rank), "there are other microbatches"
    order = world.flow.room_order(world.feeder.index)
    assert order is not None and order.released


def test_the_last_rank_to_read_the_last_microbatch_is_known() -> None:
    world = World()
    world.feed()
    world.encode()
    world.read_all(0, 0)
    slots = world.plan().num_slots
    for slot in range(slots):
        located(world.flow, 0, slot, 1)
        assert world.flow.microbatches.release(0, (slot,), 1) == (slot == slots - 1)


def test_a_microbatch_is_read_once_by_those_who_know_where_it_lies() -> None:
    world = World()
    world.feed()
    world.encode()
    located(world.flow, 0, 0, 0)
    with pytest.raises(PoolError, match="slot 0 cannot be released by rank 1"):
        world.flow.microbatches.release(0, (0,), 1)
    world.flow.microbatches.release(0, (0,), 0)
    with pytest.raises(PoolError, match="slot 0 cannot be released by rank 0"):
        world.flow.microbatches.release(0, (0,), 0)


def test_in_arrival_order_the_first_to_come_decides_for_its_replica() -> None:
    world = World()
    world.feed()
    ready_alone = [
        slot for slot in range(world.plan().num_slots) if slot in world.flow.microbatches._units[0].ready_slots[0]
    ]
    world.encode(1)
    first = world.slot(0, None, 1)
    assert first is not None and first not in ready_alone[1:]
    world.encode()
    second = world.slot(0, None, 1)
    assert second is not None and second != first
    assert [world.slot(0, None, 0) for _ in range(2)] == [first, second], "though others are ready by now"
    assert world.slot(0, second, 0) == second, "asking again for what it has takes nothing new"
    third = world.slot(0, None, 0)
    assert third not in (first, second)
    assert world.slot(0, None, 1) == third
    for rank in range(NUM_MEMBERS):
        assert world.slot(0, None, rank) is None or world.plan().num_slots > 3


def test_each_replica_has_an_order_of_its_own() -> None:
    world = World(dp_size=2)
    world.feed()
    world.encode()
    taken = {rank: [world.slot(0, None, rank) for _ in range(world.plan().num_slots)] for rank in (0, 2, 1, 3)}
    assert taken[0] == taken[1] and taken[2] == taken[3]
    assert located(world.flow, 0, 0, 0).dp_rank == 0  # type: ignore[union-attr]  # it is there
    assert located(world.flow, 0, 0, 3).dp_rank == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("arrival", [False, True])
def test_no_rank_reads_ahead_of_a_unit_that_others_still_read(arrival: bool) -> None:
    world = World()
    for _ in range(2):
        world.feed()
        world.encode()
    world.read_all(0, 0)
    slot = None if arrival else 0
    assert located(world.flow, 1, slot, 0) is None
    said = world.flow.describe_wait(1, slot, 0)
    num_left = world.plan().num_slots
    assert said == f"unit 1 waits until all ranks have read unit 0: {num_left} microbatches are left"
    world.read_all(0, 1)
    assert located(world.flow, 1, slot, 0) is not None


def test_one_rank_alone_reads_ahead() -> None:
    world = World(replica_size=1, dp_size=2)
    for _ in range(2):
        world.feed()
        world.encode()
    world.read_all(0, 0)
    assert located(world.flow, 1, 0, 0) is not None


def lose_and_reject(world: World, rank: int) -> int:
    """A rank locates a microbatch. Then its images are lost, and one is bad when they are produced again."""
    world.feed()
    world.encode()
    slot, position = next(
        (slot, sample.position)
        for slot, row in enumerate(world.plan().slots)
        for sample in row[0].samples
        if sample_of(sample.position).num_vision_tokens
    )
    assert world.slot(0, slot, rank) == slot
    world.flow.process_lost("encoder-0")
    world.encoder = SimulatedEncoder(world.flow.join("encoder-0", "node").process_index, 1 << 16)
    world.flow.hand_in(world.encoder.index, EncoderReport(rejections=(rejection_of(position),)))
    world.encode()
    return slot


def test_a_rank_whose_microbatch_was_lost_before_others_located_it_leaves_out_bad_samples() -> None:
    world = World()
    slot = lose_and_reject(world, rank=0)
    again = located(world.flow, 0, slot, 0)
    assert again is not None and len(again.rejected) == 1
    other = located(world.flow, 0, slot, 1)
    assert other is not None and other.rejected == again.rejected


def test_no_rank_leaves_out_what_another_may_have_trained_on() -> None:
    world = World()
    slot = lose_and_reject(world, rank=0)
    with pytest.raises(DataError, match=r"positions \[\d+\] were found bad .* other ranks of the replica"):
        located(world.flow, 0, slot, 1)


def test_each_rank_gets_what_its_next_microbatch_waits_for() -> None:
    world = World()
    world.feed()
    assert "unit 0 is planned" not in world.flow.describe_wait(0, None, 0)
    assert "slot 0, rank 0" in world.flow.describe_wait(0, None, 1)
    world.encode()
    for _ in range(2):
        located(world.flow, 0, None, 0)
    assert "slot 1, rank 0" in world.flow.describe_wait(0, 1, 1)


def test_a_unit_ends_when_every_rank_of_every_replica_is_done_with_it() -> None:
    world = World(dp_size=2)
    world.feed()
    world.encode()
    for rank in range(4):
        world.read_all(0, rank)
    world.flow.log.take()
    unit = world.plan().unit
    finished = [world.flow.finish(report_of(unit, rank // NUM_MEMBERS), ()) for rank in (3, 0, 2, 1)]
    assert finished == [False, False, False, True]
    (done,) = (event for event in world.flow.log.take() if isinstance(event, UnitDone))
    assert [report.dp_rank for report in done.reports] == [0, 1]


def test_a_checkpoint_is_complete_when_every_rank_has_written() -> None:
    flow = World(dp_size=2).flow
    assert [flow.log.checkpoint_written(2, rank, "there") for rank in (0, 3, 1, 2)] == [False, False, False, True]
    assert flow.log.take() == (CheckpointWritten(2, "there"),)


def test_a_replicas_times_are_those_of_its_slowest_rank() -> None:
    report = report_of(Unit(0, UnitKind.TRAIN, 1, 0, 4), 0)
    first = replace(report, started_s=1.0, finished_s=5.0, starved_s=0.5, fetch_s=0.1, microbatch_s=(2.0, 1.0))
    last = replace(report, started_s=2.0, finished_s=7.0, starved_s=0.1, fetch_s=0.3, microbatch_s=(1.0, 3.0))
    other = replace(report, dp_rank=1, microbatch_s=(9.0, 9.0))
    merged, alone = of_replicas([other, last, first])
    assert alone == other
    assert merged == replace(report, started_s=1.0, finished_s=7.0, starved_s=0.5, fetch_s=0.3, microbatch_s=(2.0, 3.0))
    assert of_replicas([replace(report, microbatch_s=())])[0].microbatch_s == (), "an evaluation has none"
