"""An encoder is lost for good while the other's segment is full of later positions: the run still ends."""

from __future__ import annotations

import asyncio

import pytest

from flowtrain.actors.coordinator import Coordinator
from flowtrain.flow.flow import Flow
from flowtrain.types.events import UnitDone
from flowtrain.types.messages import MicrobatchLocation
from flowtrain.types.run_plan import Mode
from tests.flow.simulation import (
    BATCH,
    ENCODER_NBYTES,
    SPACE,
    VISION,
    SimulatedEncoder,
    SimulatedFeeder,
    SimulatedReplica,
    build_flow,
    is_found_bad_early,
    is_found_bad_late,
)

NUM_STEPS, LOOKAHEAD, DP_SIZE = 12, 8, 2
ROUNDS = 400
FOREVER_S, HANG_S = 1000.0, 20.0


class World:
    """A feeder, two encoders, each with room for a worst-case step, and two replicas."""

    def __init__(self, arrival: bool, mode: Mode = "decoupled") -> None:
        self.flow: Flow = build_flow(
            num_steps=NUM_STEPS, lookahead=LOOKAHEAD, arrival=arrival, dp_size=DP_SIZE, mode=mode
        )
        self.feeder = SimulatedFeeder(self.flow.join("feeder-0", "node", 0).process_index)
        self.encoders = [
            SimulatedEncoder(self.flow.join(f"encoder-{i}", "node").process_index, 2 * ENCODER_NBYTES) for i in range(2)
        ]
        self.replicas = [SimulatedReplica(self.flow, dp_rank, arrival, 0) for dp_rank in range(DP_SIZE)]
        self.rows: list[int] = []
        self.num_evicted = 0

    def feed(self) -> bool:
        if self.feeder.report is not None:
            self.feeder.free(self.flow.feed(self.feeder.index, self.feeder.report))
            self.feeder.report = None
        order = self.flow.feed_order(self.feeder.index)
        if order is None:
            return False
        self.feeder.free(order.released)
        if order.unit is not None or order.remake:
            self.feeder.report = self.feeder.make(order.unit, order.remake, order.consumed)
        return self.feeder.report is not None

    def encode(self, encoder: SimulatedEncoder) -> bool:
        """Ask once for a lease; returns whether one was granted."""
        encoder.take(self.flow.lease_order(encoder.index, VISION, encoder.arena.available_nbytes))
        if not encoder.work:
            return False
        encoder.free(self.flow.hand_in(encoder.index, encoder.encode()))
        return True

    def run(self, encoders: list[SimulatedEncoder]) -> bool:
        """Let all processes work; returns whether the run ended."""
        for _ in range(ROUNDS):
            self.feed()
            for encoder in encoders:
                self.encode(encoder)
            for replica in self.replicas:
                if replica.running or replica.unit <= min(other.unit for other in self.replicas):
                    replica.move(self.check)
            self.rows += [row.position for e in self.flow.log.take() if isinstance(e, UnitDone) for row in e.ledger]
            if all(replica.stopped for replica in self.replicas):
                return True
        return False

    def check(self, location: MicrobatchLocation) -> bool:
        owners = {owner.index: owner for owner in (self.feeder, *self.encoders)}
        for part in location.parts:
            assert not is_found_bad_early(part.position) and not is_found_bad_late(part.position)
            for extent in part.extents:
                assert owners[SPACE.translate(extent.gva).process_index].has(extent)
        return True


def lose_the_first_batches(world: World) -> SimulatedEncoder:
    """encoder-1 has the first two batches, encoder-0 is full of later ones; then encoder-1 dies for good."""
    while world.feed():
        pass
    survivor, dead = world.encoders
    assert world.encode(dead) and world.encode(dead)
    while world.encode(survivor):
        pass
    assert survivor.arena.available_nbytes < 8 * 64, "full of later positions"
    world.flow.process_lost("encoder-1", for_good=True)
    del world.encoders[1]
    return survivor


@pytest.mark.parametrize("mode", ["decoupled", "disaggregated"])
@pytest.mark.parametrize("arrival", [False, True])
def test_the_survivor_makes_room_and_every_position_is_consumed_once(arrival: bool, mode: Mode) -> None:
    world = World(arrival, mode)
    survivor = lose_the_first_batches(world)
    assert world.run([survivor])
    assert sorted(world.rows) == list(range(NUM_STEPS * BATCH))
    while world.encode(survivor):
        pass
    assert survivor.arena.used_nbytes == 0


def test_without_eviction_it_would_be_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowtrain.flow.flow.make_room", lambda *arguments: False)
    world = World(arrival=False)
    survivor = lose_the_first_batches(world)
    assert not world.run([survivor])
    assert world.rows == []
    waits = [world.flow.describe_wait(0, replica.num_read, replica.dp_rank) for replica in world.replicas]
    assert any("no encoder has room" in wait for wait in waits)


def test_the_encoder_that_reports_the_last_batch_is_asked_again_for_its_room() -> None:
    """Nothing is evicted while an encoder encodes, nor by a room that was measured before its features were put."""
    world = World(arrival=False)
    while world.feed():
        pass
    survivor, dead = world.encoders
    assert world.encode(dead) and world.encode(dead)
    flow = world.flow
    while (order := flow.lease_order(survivor.index, VISION, survivor.arena.available_nbytes)) is not None:
        while survivor.work:
            survivor.free(flow.hand_in(survivor.index, survivor.encode()))
        survivor.take(order)

    async def scenario() -> None:
        coordinator = Coordinator(lambda: flow, FOREVER_S)
        asked = asyncio.ensure_future(coordinator.lease(survivor.index, VISION, survivor.arena.available_nbytes))
        await coordinator.process_lost("encoder-1", for_good=True)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not asked.done() and len(survivor.work) == 1
        survivor.free((await coordinator.hand_in(survivor.index, survivor.encode())).refused)
        order = await asyncio.wait_for(asked, HANG_S)
        assert order.lease is None and not order.released and not order.stop
        lease = coordinator.lease(survivor.index, VISION, survivor.arena.available_nbytes)
        order = await asyncio.wait_for(lease, HANG_S)
        assert order.lease is not None and order.lease.batch.unit == 0 and order.released
        survivor.take(order)  # the arena refuses what there is no room for

    asyncio.run(scenario())
    del world.encoders[1]
    survivor.free(flow.hand_in(survivor.index, survivor.encode()))
    assert world.run([survivor])
    assert sorted(world.rows) == list(range(NUM_STEPS * BATCH))
