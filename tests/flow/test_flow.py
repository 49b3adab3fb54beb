"""The run's bookkeeping under random interleavings: every unit ends, every position once, all replicas agree."""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flowtrain.errors import PoolError
from flowtrain.flow.capacity import check_capacity
from flowtrain.flow.consumed import ConsumedPositions
from flowtrain.flow.flow import ASK_AGAIN, Flow
from flowtrain.flow.report import EventLog, _source_losses
from flowtrain.flow.units import ends_step, unit_sequence
from flowtrain.types.evaluation import EvalRounds
from flowtrain.types.events import CheckpointFailed, CheckpointWritten, LedgerRow, Rejected, SpansRecorded, UnitDone
from flowtrain.types.memory import Tier
from flowtrain.types.messages import EncoderReport, FeedReport, Lease, MicrobatchLocation, SampleLoss, Span
from flowtrain.types.plan import Flops, Unit, UnitKind
from flowtrain.types.run_plan import ENCODER_MODES, Mode
from flowtrain.types.samples import IMAGES_PART, TEXT_PART, SamplerState
from tests.flow import simulation
from tests.flow.simulation import (
    ARRIVAL_NBYTES,
    BATCH,
    ENCODER_NBYTES,
    LARGEST_FED_NBYTES,
    LEASE_TIMEOUT_S,
    SPACE,
    VISION,
    Owner,
    SimulatedEncoder,
    SimulatedFeeder,
    SimulatedReplica,
    build_flow,
    images_of,
    is_found_bad_early,
    is_found_bad_late,
    is_read,
    located,
    planner_of,
    rejection_of,
    report_of,
    sample_of,
    text_only,
)

DP_SIZE, NUM_ENCODERS, NUM_STEPS, MAX_FEEDERS = 2, 2, 4, 3
EVALUATIONS = (EvalRounds(2, 3), EvalRounds(4, 2))
"""Two held-out sets; both are due after the last step."""
MODES: tuple[Mode, ...] = ("decoupled", "disaggregated", "monolithic", "llm_only")


class FlowMachine(RuleBasedStateMachine):
    """All processes may be slow, producers may die while a report is on its way, and the user may stop the run."""

    @initialize(
        lookahead=st.integers(1, 3),
        arrival=st.booleans(),
        start_step=st.sampled_from([0, 2]),
        with_eval=st.booleans(),
        roomy=st.booleans(),
        slow=st.integers(0, NUM_ENCODERS),
        ahead=st.integers(0, 2),
        limit=st.integers(1, 3),
        num_feeders=st.integers(1, 3),
        short_of_room=st.booleans(),
        mode=st.sampled_from(MODES),
        in_turn=st.booleans(),
    )
    def start(
        self,
        lookahead: int,
        arrival: bool,
        start_step: int,
        with_eval: bool,
        roomy: bool,
        slow: int,
        ahead: int,
        limit: int,
        num_feeders: int,
        short_of_room: bool,
        mode: Mode,
        in_turn: bool,
    ) -> None:
        self.now = 0.0
        self.in_turn = in_turn and mode in ENCODER_MODES
        self.mode = mode
        self.planner = planner_of(DP_SIZE, mode)
        self.num_feeders = num_feeders
        self.feeder_nbytes = BATCH * LARGEST_FED_NBYTES if short_of_room else 1 << 14
        check_capacity([self.feeder_nbytes], LARGEST_FED_NBYTES, BATCH, "knob")
        self.ahead, self.limit = ahead, limit
        self.slow = slow
        self.encoder_nbytes = 1 << 16 if roomy else ARRIVAL_NBYTES if arrival else ENCODER_NBYTES
        self.lookahead = lookahead
        self.arrival = arrival
        self.evaluations = EVALUATIONS if with_eval else ()
        self.units = list(unit_sequence(NUM_STEPS, BATCH, None, self.evaluations, start_step))
        self.events: list[UnitDone] = []
        self.rejected: list[int] = []
        self.first_step = start_step
        self.start_run(start_step, SamplerState(start_step * BATCH))

    def start_run(self, start_step: int, sampler_state: SamplerState) -> None:
        self.start_flow(start_step, sampler_state)
        self.owners: dict[int, Owner] = {}
        self.dead: dict[int, Owner] = {}
        self.feeders: list[SimulatedFeeder | None] = [self.join_feeder(n) for n in range(self.num_feeders)]
        self.encoders = [self.join_encoder(which) for which in range(NUM_ENCODERS)]
        self.reports: list[list[EncoderReport]] = [[] for _ in range(NUM_ENCODERS)]
        self.start_backbone()
        self.stopped_after: int | None = None

    def start_flow(self, start_step: int, sampler_state: SamplerState, earlier: Flow | None = None) -> None:
        self.flow = build_flow(
            num_steps=NUM_STEPS,
            evaluations=self.evaluations,
            start_step=start_step,
            sampler_state=sampler_state,
            arrival=self.arrival,
            lookahead=self.lookahead,
            dp_size=DP_SIZE,
            num_feeders=self.num_feeders,
            mode=self.mode,
            in_turn=self.in_turn,
            clock=lambda: self.now,
            earlier=earlier,
        )

    def start_backbone(self) -> None:
        first = self.units[len(self.events)].index if len(self.events) < len(self.units) else 1 << 62
        self.replicas = [
            SimulatedReplica(self.flow, dp_rank, self.arrival, first, self.ahead, self.limit)
            for dp_rank in range(DP_SIZE)
        ]

    def join_feeder(self, number: int) -> SimulatedFeeder:
        joined = self.flow.join(f"feeder-{number}", "node", number)
        assert joined.sampler_state is not None
        upcoming = self.flow.feeding.next_unit(joined.process_index)
        if upcoming is not None and upcoming.kind is UnitKind.TRAIN:
            assert joined.sampler_state.next_position == upcoming.first_position
        keeps_images = self.mode != "llm_only"
        feeder = SimulatedFeeder(joined.process_index, self.feeder_nbytes, number, self.num_feeders, keeps_images)
        self.owners[feeder.index] = feeder
        return feeder

    def join_encoder(self, which: int) -> SimulatedEncoder:
        index = self.flow.join(f"encoder-{which}", "node").process_index
        encoder = SimulatedEncoder(index, self.encoder_nbytes)
        assert encoder.index not in self.owners, "an index is never used again"
        self.owners[encoder.index] = encoder
        return encoder

    # --- feeders ------------------------------------------------------------------------------------------------

    @rule(which=st.integers(0, MAX_FEEDERS - 1))
    def feeder_reports(self, which: int) -> None:
        feeder = self.feeders[which % self.num_feeders]
        if feeder is not None and feeder.report is not None:
            report, feeder.report = feeder.report, None
            feeder.free(self.flow.feed(feeder.index, report))

    @rule(which=st.integers(0, MAX_FEEDERS - 1))
    def feeder_works(self, which: int) -> None:
        feeder = self.feeders[which % self.num_feeders]
        if feeder is None or feeder.report is not None:
            return
        if feeder.is_busy:
            feeder.work(self.flow)
            return
        order = self.flow.feed_order(feeder.index)
        if order is None:
            return
        feeder.free(order.released)
        if order.stop:
            assert self.nothing_is_left_to_run()
        elif order.starts_at is not None:
            upcoming = self.flow.feeding.next_unit(feeder.index)
            if upcoming is not None and upcoming.kind is UnitKind.TRAIN:
                assert order.starts_at.next_position == upcoming.first_position
        elif order.unit is not None or order.remake:
            if order.unit is not None:
                current = min(replica.unit for replica in self.replicas)
                assert order.unit.index <= current + self.ahead + self.lookahead
            feeder.begin(order.unit, order.remake, order.consumed)
            feeder.work(self.flow)

    @rule(which=st.sets(st.integers(0, MAX_FEEDERS - 1), min_size=1), arrives=st.booleans(), is_noticed=st.booleans())
    def feeders_die(self, which: set[int], arrives: bool, is_noticed: bool) -> None:
        """The last report of each may arrive after the controller has reported its death."""
        for number in {each % self.num_feeders for each in which}:
            dead = self.feeders[number]
            if dead is None:
                continue
            self.feeders[number] = None
            self.dead[dead.index] = self.owners.pop(dead.index)
            if is_noticed:
                self.flow.process_lost(f"feeder-{number}")
                if arrives and dead.report is not None:
                    assert self.flow.feed(dead.index, dead.report) == ()

    @rule(which=st.integers(0, MAX_FEEDERS - 1))
    def feeder_comes_back(self, which: int) -> None:
        number = which % self.num_feeders
        if self.feeders[number] is None:
            self.feeders[number] = self.join_feeder(number)

    # --- encoders -----------------------------------------------------------------------------------------------

    @rule(which=st.integers(0, NUM_ENCODERS - 1))
    def encoder_leases(self, which: int) -> None:
        encoder = self.encoders[which]
        order = self.flow.lease_order(encoder.index, VISION, encoder.arena.available_nbytes)
        encoder.take(order)
        if order is not None and order.lease is not None and self.in_turn:
            assert all(replica.reading >= order.lease.batch.unit for replica in self.replicas)
        if order is not None and order.stop:
            assert self.nothing_is_left_to_run()

    @rule(which=st.integers(0, NUM_ENCODERS - 1), reads_the_dead=st.booleans())
    def encoder_encodes(self, which: int, reads_the_dead: bool = False) -> None:
        """It returns a lease whose images it cannot read. It may have mapped the memory of a process that died."""
        if self.encoders[which].work:
            lease, _ = self.encoders[which].work[0]
            self.check_refs(lease)
            readable = {**self.dead, **self.owners} if reads_the_dead else self.owners
            self.reports[which].append(self.encoders[which].encode(readable))

    def check_refs(self, lease: Lease) -> None:
        """In deterministic order a batch is always encoded from the same images, however much of it was lost."""
        refs = [ref.position for ref in lease.refs]
        assert set(lease.needed) <= set(refs) <= set(lease.batch.positions)
        if not self.arrival:
            bad = {position for position in lease.batch.positions if is_found_bad_late(position)}
            assert [p for p in refs if p not in bad] == [p for p in lease.batch.positions if p not in bad]

    @invariant()
    def no_image_is_freed_while_a_lease_refers_to_it(self) -> None:
        if not hasattr(self, "flow"):
            return
        for record in self.flow.parts.leases._leases.values():
            for ref, images in images_of(record.lease):
                assert is_read(images, ref.position, {**self.dead, **self.owners})

    @rule(which=st.integers(0, NUM_ENCODERS - 1))
    def encoder_hands_in(self, which: int) -> None:
        if self.reports[which]:
            encoder = self.encoders[which]
            encoder.free(self.flow.hand_in(encoder.index, self.reports[which].pop(0)))

    @rule(which=st.integers(0, NUM_ENCODERS - 1), arrives=st.booleans(), is_noticed=st.booleans())
    def encoder_dies(self, which: int, arrives: bool, is_noticed: bool) -> None:
        dead = self.encoders[which]
        del self.owners[dead.index]
        if is_noticed:
            self.flow.process_lost(f"encoder-{which}")
        self.encoders[which] = self.join_encoder(which)
        for report in self.reports[which] if arrives else ():
            refused = self.flow.hand_in(dead.index, report)
            assert refused == tuple(extent for part in report.ready for extent in part.extents)
        self.reports[which].clear()

    @rule(seconds=st.sampled_from([1.0, LEASE_TIMEOUT_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    # --- the backbone -------------------------------------------------------------------------------------------

    @rule(dp_rank=st.integers(0, DP_SIZE - 1), moves=st.integers(1, 4))
    def replica_moves(self, dp_rank: int, moves: int) -> None:
        replica = self.replicas[dp_rank]
        for _ in range(moves):
            if is_ahead(self.replicas, dp_rank) or not replica.move(self.check_location):
                break
            self.check_plan(replica.unit)
        self.take_events()

    def check_plan(self, index: int) -> None:
        """In deterministic order a plan depends on the unit alone: on no fault, and not on the number of feeders."""
        plan = self.flow.steps.plan_of(index)
        if plan is not None and not self.arrival:
            samples = [sample_of(position) for position in plan.unit.positions if not is_found_bad_early(position)]
            if self.mode == "llm_only":
                samples = [text_only(sample) for sample in samples]
            assert plan == self.planner.plan(plan.unit, samples)

    def check_location(self, location: MicrobatchLocation) -> bool:
        """All located parts of living owners exist, for all samples except rejected ones. Returns whether all live."""
        is_there = True
        names = [part.part for part in location.parts]
        assert (IMAGES_PART in names) <= (self.mode == "monolithic")
        assert (VISION in names) <= (self.mode in ENCODER_MODES)
        for part in location.parts:
            assert not is_found_bad_early(part.position)
            if part.part == IMAGES_PART:
                assert part.pieces == sample_of(part.position).image_nbytes and part.ref == sample_of(part.position).ref
            for extent in part.extents:
                owner = self.owners.get(SPACE.translate(extent.gva).process_index)
                what = (part.position, part.part)
                assert owner is None or owner.contents.get(extent) == what, "a part was freed before it was read"
                is_there &= owner is not None
        assert all(is_found_bad_late(position) for position in location.rejected)
        return is_there

    @rule(slow=st.integers(0, NUM_ENCODERS), rounds=st.integers(1, 12))
    def time_goes_by(self, slow: int, rounds: int) -> None:
        """All processes work, or all except one encoder, which keeps its work."""
        for _ in range(rounds):
            self.everybody_moves(but=slow)

    @precondition(lambda self: self.stopped_after is None)
    @rule()
    def user_stops(self) -> None:
        self.stopped_after = max(replica.unit for replica in self.replicas)
        self.flow.steps.request_stop()

    @rule(back=st.integers(0, 2), num_feeders=st.integers(1, MAX_FEEDERS))
    def everything_dies(self, back: int, num_feeders: int) -> None:
        """The run is resumed after one of its last steps, from that step's checkpoint."""
        self.num_feeders = num_feeders
        self.start_run(*self.go_back(back))

    @rule(back=st.integers(0, 2))
    def the_backbone_dies(self, back: int) -> None:
        """Its ranks start again after one of the last steps. Producers stay, whatever they have on their hands."""
        start_step, sampler_state = self.go_back(back)
        self.start_flow(start_step, sampler_state, self.flow)
        self.start_backbone()

    def go_back(self, back: int) -> tuple[int, SamplerState]:
        """Forget what came after a checkpoint of one of the last steps; returns the step and the sampler's state."""
        self.take_events()
        whole = [end for end, unit in enumerate(self.units, 1) if ends_step(self.evaluations, unit)]
        ends = [0, *(end for end in whole if end <= len(self.events))]
        self.events = self.events[: ends[max(-1 - back, -len(ends))]]
        steps = [event for event in self.events if event.unit.kind is UnitKind.TRAIN]
        kept = {row.position for event in self.events for row in event.ledger}
        self.rejected = [position for position in self.rejected if position in kept]
        if steps:
            return steps[-1].unit.step, steps[-1].sampler_state
        return self.first_step, SamplerState(self.first_step * BATCH)

    # --- what comes out -----------------------------------------------------------------------------------------

    def take_events(self) -> None:
        for event in self.flow.log.take():
            if isinstance(event, UnitDone):
                self.events.append(event)
            elif isinstance(event, Rejected):
                self.rejected += [rejection.ref.position for rejection in event.rejections]

    def nothing_is_left_to_run(self) -> bool:
        self.take_events()
        done = len(self.events)
        return done == len(self.units) or any(False in replica.answers.values() for replica in self.replicas)

    def teardown(self) -> None:
        """Without further faults the run ends, in every case; one encoder may be slower than the other."""
        if not hasattr(self, "flow"):
            return
        for number in range(800):
            if all(replica.stopped for replica in self.replicas):
                break
            self.everybody_moves(but=self.slow if number % 16 else None)
        assert all(replica.stopped for replica in self.replicas), "stuck"
        self.take_events()
        self.check_the_end()

    def everybody_moves(self, but: int | None = None) -> None:
        for number in range(self.num_feeders):
            self.feeder_comes_back(number)
            self.feeder_reports(number)
            self.feeder_works(number)
        for which in range(NUM_ENCODERS):
            if which != but or not self.encoders[which].work:
                self.encoder_leases(which)
            if which != but:
                self.encoder_encodes(which)
                self.encoder_hands_in(which)
        for dp_rank in range(DP_SIZE):
            self.replica_moves(dp_rank, 1)

    def check_the_end(self) -> None:
        done = [replace(event.unit, chosen=()) for event in self.events]
        assert done == self.units[: len(done)]
        if self.stopped_after is None:
            assert done == self.units
        elif len(done) < len(self.units):
            assert self.units[len(done)].kind is UnitKind.TRAIN, "an evaluation belongs to the step before it"
            # No replica begins a step after the stop, but one that another replica began before is run by all.
            assert all(unit.index <= self.stopped_after + 1 for unit in done)
        assert all(replica.answers == self.replicas[0].answers for replica in self.replicas)
        consumed = ConsumedPositions(self.first_step * BATCH)
        for event in self.events:
            assert [row.position for row in event.ledger] == list(event.unit.positions)
            for row in event.ledger:
                bad = is_found_bad_early(row.position) or (is_found_bad_late(row.position) and self.mode != "llm_only")
                assert row.state == ("rejected" if bad else "consumed")
            if event.unit.kind is UnitKind.TRAIN:
                self.check_order(event, consumed)
        if self.stopped_after is None:
            assert (consumed.frontier, consumed.ahead) == (NUM_STEPS * BATCH, ())
        assert len(set(self.rejected)) == len(self.rejected), "a sample is quarantined once"
        self.producers_stop()
        if self.stopped_after is None:
            self.check_memory_is_free()

    def check_order(self, event: UnitDone, consumed: ConsumedPositions) -> None:
        """A position runs once, by arrival within the window; the sampler's state lists the positions that have run."""
        consumed.add(event.unit.positions)
        state = ConsumedPositions.at(event.sampler_state)
        assert (state.frontier, state.ahead) == (consumed.frontier, consumed.ahead)
        step = event.unit.step
        late = [step - (1 + position // BATCH) for position in event.unit.positions]
        assert max(map(abs, late)) <= (self.lookahead if self.arrival else 0)
        if step == NUM_STEPS or not ends_step(self.evaluations, self.units[self.events.index(event)]):
            assert (state.frontier, state.ahead) == (step * BATCH, ())

    def producers_stop(self) -> None:
        """All producers learn that the run is over, also those that wait for room."""
        for number in range(self.num_feeders):
            self.feeder_comes_back(number)
            feeder = self.feeders[number]
            assert feeder is not None
            if feeder.is_busy:
                feeder.work(self.flow)
                assert not feeder.is_busy
            self.feeder_reports(number)
            order = self.flow.feed_order(feeder.index)
            assert order is not None and order.stop
            feeder.free(order.released)
        for which, encoder in enumerate(self.encoders):
            while encoder.work or self.reports[which]:
                self.encoder_encodes(which)
                self.encoder_hands_in(which)
            order = self.flow.lease_order(encoder.index, VISION, 1 << 20)
            assert order is not None and order.stop
            encoder.take(order)

    def check_memory_is_free(self) -> None:
        for feeder in self.feeders:
            assert feeder is not None
            feeder.free(self.flow.parts.holdings.take_released(feeder.index))  # what late leases have kept
        for owner in (*self.feeders, *self.encoders):
            assert owner is not None and owner.arena.used_nbytes == 0 and not owner.contents


def is_ahead(replicas: list[SimulatedReplica], dp_rank: int) -> bool:
    """Whether a replica must wait: collectives keep replicas within one unit of each other."""
    replica = replicas[dp_rank]
    return not replica.running and replica.unit > min(other.unit for other in replicas)


TestFlowMachine = FlowMachine.TestCase


# --- single facts --------------------------------------------------------------------------------------------------


def feed_next(flow: Flow, feeder: SimulatedFeeder) -> None:
    order = flow.feed_order(feeder.index)
    assert order is not None and order.unit is not None
    feeder.free(order.released)
    flow.feed(feeder.index, feeder.make(order.unit, order.remake))


def encode_all(flow: Flow, encoder: SimulatedEncoder) -> None:
    while (order := flow.lease_order(encoder.index, VISION, encoder.arena.available_nbytes)) is not None:
        encoder.take(order)
        if not encoder.work:
            return
        encoder.free(flow.hand_in(encoder.index, encoder.encode()))


def joined(flow: Flow) -> tuple[SimulatedFeeder, SimulatedEncoder]:
    feeder = SimulatedFeeder(flow.join("feeder-0", "node", 0).process_index)
    return feeder, SimulatedEncoder(flow.join("encoder-0", "node").process_index, 1 << 16)


def run_unit(flow: Flow, index: int, dp_size: int = 1) -> None:
    replicas = [SimulatedReplica(flow, dp_rank, False, index) for dp_rank in range(dp_size)]
    while any(replica.unit == index for replica in replicas):
        assert any(replica.move() for replica in replicas if replica.unit == index)


def test_a_stop_before_the_first_step_ends_without_sizing_anything() -> None:
    flow = build_flow()
    feeder, _ = joined(flow)
    flow.steps.request_stop()
    assert flow.feed_order(feeder.index) is None
    assert not flow.steps.begin(0) and not flow.steps.begin(0)
    order = flow.feed_order(feeder.index)
    assert order is not None and order.stop and flow.steps.is_past_end(0)


def test_a_unit_that_was_begun_is_sized_and_run_although_the_stop_came_first() -> None:
    flow = build_flow(dp_size=1)
    feeder, encoder = joined(flow)
    assert flow.steps.begin(0)
    flow.steps.request_stop()
    assert flow.steps.begin(0), "another replica gets the same answer"
    feed_next(flow, feeder)
    assert flow.feed_order(feeder.index) is None, "the unit after it is not sized any more"
    encode_all(flow, encoder)
    run_unit(flow, 0)
    assert not flow.steps.begin(1) and flow.steps.are_over


def test_a_stop_waits_for_the_evaluation_of_the_step_that_ran() -> None:
    flow = build_flow(num_steps=4, evaluations=(EvalRounds(1, 2),), dp_size=1)
    feeder, encoder = joined(flow)
    feed_next(flow, feeder)
    encode_all(flow, encoder)
    assert flow.steps.begin(0)
    flow.steps.request_stop()
    run_unit(flow, 0)
    assert flow.steps.begin(1), "the evaluation is not planned yet, and belongs to the step"
    feed_next(flow, feeder)
    encode_all(flow, encoder)
    run_unit(flow, 1)
    assert not flow.steps.begin(2) and flow.steps.are_over
    assert [event.unit.kind for event in flow.log.take() if isinstance(event, UnitDone)] == ["train", "eval"]


def test_a_feeder_without_room_learns_when_the_run_ends() -> None:
    flow = build_flow(dp_size=1)
    feeder, encoder = joined(flow)
    feed_next(flow, feeder)
    encode_all(flow, encoder)
    assert flow.room_order(feeder.index) is None
    assert flow.steps.begin(0)
    flow.steps.request_stop()
    run_unit(flow, 0)
    order = flow.room_order(feeder.index)
    assert order is not None and order.released and not order.stop, "the run goes on until a rank has asked"
    assert not flow.steps.begin(1)
    order = flow.room_order(feeder.index)
    assert order is not None and order.stop and not order.released


def test_a_finished_run_resumed_has_nothing_to_do() -> None:
    flow = build_flow(num_steps=2, start_step=2)
    feeder, encoder = joined(flow)
    assert flow.steps.are_over and not flow.steps.begin(1 << 62)
    order = flow.feed_order(feeder.index)
    assert order is not None and order.stop
    lease_order = flow.lease_order(encoder.index, VISION, 1 << 20)
    assert lease_order is not None and lease_order.stop


def test_the_successor_of_a_dead_feeder_continues_after_the_last_report() -> None:
    flow = build_flow(lookahead=2)
    feeder, _ = joined(flow)
    feed_next(flow, feeder)
    order = flow.feed_order(feeder.index)
    assert order is not None and order.unit is not None
    lost = feeder.make(order.unit, ())
    again = flow.join("feeder-0", "node", 0)
    assert again.sampler_state == SamplerState(BATCH)
    flow.feed(feeder.index, lost)
    successor = SimulatedFeeder(again.process_index)
    order = flow.feed_order(successor.index)
    assert order is not None and order.unit is None, "a full segment of parts that are not reported is never released"
    fed = [p for p in range(BATCH) if not is_found_bad_early(p)]
    both = (IMAGES_PART, TEXT_PART)
    parts = [both if sample_of(p).image_nbytes else (TEXT_PART,) for p in fed]
    assert [(lost.ref.position, lost.parts) for lost in order.remake] == list(zip(fed, parts, strict=True))
    flow.feed(successor.index, successor.make(None, order.remake))
    order = flow.feed_order(successor.index)
    assert order is not None and order.unit is not None and order.unit.index == 1, "the dead one's report came too late"
    assert order.remake == ()


def test_the_dead_do_not_count_in_the_pools_occupancy() -> None:
    flow = build_flow(num_steps=1, dp_size=1)
    feeder, encoder = joined(flow)
    feed_next(flow, feeder)
    dead = SimulatedEncoder(flow.join("encoder-1", "node").process_index)
    flow.process_lost("encoder-1")
    flow.process_lost("encoder-1")
    flow.hand_in(dead.index, EncoderReport(stats=dead.stats))
    encode_all(flow, encoder)
    run_unit(flow, 0)
    (done,) = (event for event in flow.log.take() if isinstance(event, UnitDone))
    assert done.pool_dram_bound_nbytes == feeder.arena.bound_nbytes + encoder.arena.bound_nbytes


def test_an_encoder_is_blocked_while_it_holds_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units last from 0 to 1 and from 1 to 3; the encoder asks at 0.25, and works from 0.5 to 0.75."""
    flow = build_flow(num_steps=2, dp_size=1)
    feeder, encoder = joined(flow)
    now_s = 0.25
    monkeypatch.setattr(EventLog, "now_s", property(lambda log: now_s))
    assert flow.lease_order(encoder.index, VISION, encoder.arena.available_nbytes) is None, "nothing is sized"
    for _ in range(2):
        feed_next(flow, feeder)
    now_s = 0.5
    encoder.take(flow.lease_order(encoder.index, VISION, encoder.arena.available_nbytes))
    now_s = 0.75
    encoder.free(flow.hand_in(encoder.index, encoder.encode()))
    encode_all(flow, encoder)  # in no time
    plain = simulation.report_of
    ends_s = {0: 1.0, 1: 3.0}
    monkeypatch.setattr(
        simulation, "report_of", lambda unit, rank: replace(plain(unit, rank), finished_s=ends_s[unit.index])
    )
    for unit in range(2):
        now_s = ends_s[unit]
        run_unit(flow, unit)
    first, second = (event for event in flow.log.take() if isinstance(event, UnitDone))
    assert (first.blocked_s, second.blocked_s) == (0.25 + 0.25, 2.0)


def test_an_encoder_that_works_for_an_earlier_flow_is_not_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks the flow that took over at 1, and hands in its batch of the earlier one at 2."""
    earlier = build_flow(num_steps=2, dp_size=1)
    feeder, encoder = joined(earlier)
    now_s = 0.0
    monkeypatch.setattr(EventLog, "now_s", property(lambda log: now_s))
    feed_next(earlier, feeder)
    encoder.take(earlier.lease_order(encoder.index, VISION, encoder.arena.available_nbytes))
    flow = build_flow(num_steps=2, dp_size=1, earlier=earlier)
    now_s = 1.0
    assert flow.lease_order(encoder.index, VISION, encoder.arena.available_nbytes) is None, "nothing is sized"
    now_s = 2.0
    encoder.free(flow.hand_in(encoder.index, encoder.encode()))
    assert flow.log.idle is not None and flow.log.idle.take(0.0, 3.0) == 1.0


def test_reports_add_up_over_a_unit() -> None:
    flow = build_flow(num_steps=2, dp_size=1)
    feeder, encoder = joined(flow)
    for unit in range(2):
        feed_next(flow, feeder)
        encode_all(flow, encoder)
        run_unit(flow, unit)
    first, second = (event for event in flow.log.take() if isinstance(event, UnitDone))
    good = [p for p in range(2 * BATCH) if not is_found_bad_early(p) and not is_found_bad_late(p)]
    assert first.produced_samples + second.produced_samples == len(good)
    assert any(is_found_bad_late(p) for p in range(BATCH, 2 * BATCH)), "planned, and rejected afterwards"
    for done, positions in ((first, range(BATCH)), (second, range(BATCH, 2 * BATCH))):
        num_ran = sum(p in good for p in positions)
        assert done.flops == Flops(encoders=num_ran, connector=num_ran, backbone=num_ran)


def test_a_step_says_what_was_read_and_tried_again_until_its_end() -> None:
    flow = build_flow(num_steps=2, dp_size=1)
    feeder, encoder = joined(flow)
    feed_next(flow, feeder)
    encode_all(flow, encoder)
    flow.feed(feeder.index, FeedReport(num_retries=2))
    flow.hand_in(encoder.index, EncoderReport(read_by_transport={"shared_memory": 5}))
    run_unit(flow, 0)
    feed_next(flow, feeder)
    encode_all(flow, encoder)
    run_unit(flow, 1)
    first, second = (event for event in flow.log.take() if isinstance(event, UnitDone))
    assert (first.retries, first.read_by_transport) == (2, {"shared_memory": 5})
    assert (second.retries, second.read_by_transport) == (0, {})


def test_a_step_says_how_many_are_ready_after_it_and_whose_memory_is_in_use() -> None:
    flow = build_flow(num_steps=4, lookahead=2, dp_size=1)
    feeder, encoder = joined(flow)
    for _ in range(3):
        feed_next(flow, feeder)
    encode_all(flow, encoder)
    for unit in range(3):
        run_unit(flow, unit)
    done = [event for event in flow.log.take() if isinstance(event, UnitDone)]
    assert [event.lookahead for event in done] == [2, 1, 0]
    for event in done:
        assert [(use.name, use.tier) for use in event.pool] == [("feeder-0", Tier.DRAM), ("encoder-0", Tier.DRAM)]
        assert event.pool_dram_nbytes == sum(use.used_nbytes for use in event.pool)
        assert [use.bound_nbytes for use in event.pool] == [feeder.arena.bound_nbytes, encoder.arena.bound_nbytes]
        assert len(event.slot_imbalance) == event.num_microbatches, "one rank"
        assert set(event.slot_imbalance) == {0.0}


def test_losses_of_sources_are_those_of_their_samples_over_all_ranks() -> None:
    rows = tuple(LedgerRow(position, position % 3, position, 0, 1, 0, 0, "consumed") for position in range(6))
    unit = Unit(0, UnitKind.TRAIN, 1, 0, 6)
    first, second = (
        replace(report_of(unit, rank), sample_losses=tuple(SampleLoss(*sample) for sample in samples))
        for rank, samples in enumerate([[(0, 2.0, 4), (1, 9.0, 1)], [(3, 4.0, 2), (4, float("nan"), 1), (5, 0.0, 0)]])
    )
    losses = _source_losses((first, second), rows)
    assert losses[0] == 1.0 and math.isnan(losses[1]) and 2 not in losses, "of source 2 no token carried loss"


def test_rejections_count_training_samples_alone() -> None:
    flow = build_flow(num_steps=4, evaluations=(EvalRounds(1, 8),), lookahead=8, dp_size=1)
    feeder, _ = joined(flow)
    for _ in range(4):
        feed_next(flow, feeder)
    events = [event for event in flow.log.take() if isinstance(event, Rejected)]
    positions = [rejection.ref.position for event in events for rejection in event.rejections]
    assert any(position >= 1 << 60 for position in positions) and any(position < 1 << 60 for position in positions)
    assert events[-1].num_rejected == sum(position < 1 << 60 for position in positions)
    assert events[-1].num_seen == 2 * BATCH


@pytest.mark.parametrize(("start_step", "trace_steps"), [(0, 2), (0, 0), (2, 1)])
def test_the_trace_covers_its_steps_and_no_more(start_step: int, trace_steps: int) -> None:
    flow = build_flow(num_steps=5, start_step=start_step, trace_steps=trace_steps, dp_size=1)
    feeder, encoder = joined(flow)
    recorded = []
    for step in itertools.count(start_step + 1):
        flow.trace.record((Span("x", f"before {step}", 0.0, 1.0),))
        order = flow.feed_order(feeder.index)
        if order is None or order.unit is None:
            break
        flow.feed(feeder.index, feeder.make(order.unit, ()))
        encode_all(flow, encoder)
        run_unit(flow, step - 1)
        feeder.free(flow.feed_order(feeder.index).released)  # type: ignore[union-attr]  # a step's text is free now
        events = flow.log.take()
        recorded += [span.name for event in events if isinstance(event, SpansRecorded) for span in event.spans]
        if step == 5:
            break
    traced = range(start_step + 1, start_step + 1 + trace_steps)
    assert [name for name in recorded if name.startswith("before")] == [f"before {step}" for step in traced]


def test_a_checkpoint_is_announced() -> None:
    flow = build_flow(dp_size=2)
    flow.log.checkpoint_written(2, "there")
    assert flow.log.has_news
    assert flow.log.take() == (CheckpointWritten(2, "there"),)


def test_a_checkpoint_that_failed_is_announced() -> None:
    flow = build_flow(dp_size=2)
    flow.log.checkpoint_failed(2, "no room")
    assert flow.log.has_news and flow.log.take() == (CheckpointFailed(2, "no room"),)


def test_a_wait_names_what_it_waits_for() -> None:
    flow = build_flow(dp_size=1)
    feeder, _ = joined(flow)
    assert "feeders size unit 0 next" in flow.describe_wait(0, None, 0)
    feed_next(flow, feeder)
    assert VISION in flow.describe_wait(0, 0, 0) and "process" not in flow.describe_wait(0, 0, 0)


def test_state_does_not_grow_with_the_run() -> None:
    flow = build_flow(num_steps=30, evaluations=(EvalRounds(5, 2),), dp_size=1)
    feeder, encoder = joined(flow)
    sizes = []
    for unit in range(30 + 30 // 5):
        feed_next(flow, feeder)
        encode_all(flow, encoder)
        run_unit(flow, unit)
        flow.log.take()
        parts = flow.parts
        books = (flow, flow.log, flow.members, flow.steps, parts, parts.leases, parts.holdings, flow.microbatches)
        books = (*books, flow.feeding)
        held = [
            value for book in books for value in vars(book).values() if isinstance(value, dict | list | set | deque)
        ]
        sizes.append(sum(map(len, held)))
    assert max(sizes[10:]) <= max(sizes[:10])


def test_a_sample_that_is_found_bad_again_counts_once() -> None:
    flow = build_flow(dp_size=1)
    feeder, encoder = joined(flow)
    feed_next(flow, feeder)
    flow.log.take()
    report = EncoderReport(rejections=(rejection_of(2),))
    flow.hand_in(encoder.index, report)
    flow.hand_in(encoder.index, report)
    assert [event.num_rejected for event in flow.log.take() if isinstance(event, Rejected)] == [1]


def test_a_unit_is_fed_once_and_ends_when_it_is_released() -> None:
    flow = build_flow(dp_size=1)
    feeder, _ = joined(flow)
    order = flow.feed_order(feeder.index)
    assert order is not None and order.unit is not None
    report = feeder.make(order.unit, ())
    flow.feed(feeder.index, report)
    with pytest.raises(AssertionError):
        flow.feed(feeder.index, report)
    with pytest.raises(PoolError, match="not released"):
        flow.finish((report_of(order.unit, 0),), ())


def test_a_lease_counts_on_the_memory_that_comes_with_it() -> None:
    flow = build_flow(num_steps=6, lookahead=5, dp_size=1)
    feeder, encoder = joined(flow)
    small = SimulatedEncoder(encoder.index)
    while flow.feed_order(feeder.index) is not None:
        feed_next(flow, feeder)
    encode_all(flow, small)
    assert flow.lease_order(small.index, VISION, small.arena.available_nbytes) is None, "it is full"
    held = small.arena.used_nbytes
    run_unit(flow, 0)
    order = flow.lease_order(small.index, VISION, small.arena.available_nbytes)
    assert order is not None and order.lease is not None
    assert order.lease.nbytes > small.arena.available_nbytes and order.released
    small.take(order)  # the arena refuses what there is no room for
    assert small.arena.used_nbytes < held


def test_memory_alone_is_no_order() -> None:
    flow = build_flow(num_steps=1, dp_size=1)
    feeder, encoder = joined(flow)
    feed_next(flow, feeder)
    encode_all(flow, encoder)
    assert flow.steps.begin(0)
    plan = flow.plan_of(0)
    assert plan is not None
    for slot in range(plan.num_slots):
        assert located(flow, 0, slot, 0) is not None
        flow.microbatches.release(0, (slot,), 0)
    assert flow.feed_order(feeder.index) is None
    assert flow.lease_order(encoder.index, VISION, encoder.arena.available_nbytes) is None
    flow.finish((report_of(plan.unit, 0),), ())
    for order in (flow.feed_order(feeder.index), flow.lease_order(encoder.index, VISION, 0)):
        assert order is not None and order.stop and order.released


def test_an_encoder_whose_room_grew_meanwhile_is_asked_again() -> None:
    flow = build_flow(dp_size=1)
    _, encoder = joined(flow)
    assert flow.lease_order(encoder.index, VISION, 0) is None
    assert flow.lease_order(encoder.index, VISION, 0, is_fresh=False) is None
    flow.hand_in(encoder.index, EncoderReport(rejections=(rejection_of(2),)))
    assert flow.lease_order(encoder.index, VISION, 0, is_fresh=False) == ASK_AGAIN
    assert flow.lease_order(encoder.index, VISION, 64) is None
    assert flow.lease_order(encoder.index, VISION, 64, is_fresh=False) is None


def test_spans_wait_for_news() -> None:
    flow = build_flow(trace_steps=3)
    flow.trace.record((Span("x", "work", 0.0, 1.0),))
    assert not flow.log.has_news
    flow._reject((rejection_of(2),))
    assert flow.log.has_news
    assert [type(event) for event in flow.log.take()] == [SpansRecorded, Rejected]
    assert not flow.log.has_news


def test_in_arrival_order_a_replica_takes_each_microbatch_once() -> None:
    flow = build_flow(dp_size=1)
    feeder, encoder = joined(flow)
    feed_next(flow, feeder)
    encode_all(flow, encoder)
    plan = flow.plan_of(0)
    assert plan is not None and len(plan.slots) > 1
    taken = [located(flow, 0, None, 0) for _ in plan.slots]
    assert [location and location.slot for location in taken] == list(range(len(plan.slots)))
    assert located(flow, 0, None, 0) is None
    assert located(flow, 0, 0, 0) == taken[0], "by its slot it may be asked for again"
