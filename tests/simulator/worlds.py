"""Small runs to simulate: drawn samples, a real flow, and a record of what it was asked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

import numpy as np

from flowtrain.costs.flops import SampleFlops
from flowtrain.costs.microbatches import MicrobatchColumns, MicrobatchWork
from flowtrain.flow.build import assemble_flow
from flowtrain.flow.flow import Flow
from flowtrain.flow.members import Members
from flowtrain.flow.order import ArrivalWindow, ByArrival, InOrder, no_batches
from flowtrain.flow.parts import Parts
from flowtrain.flow.units import unit_sequence
from flowtrain.mempool.gva import AddressSpace
from flowtrain.pipeline.partition import build_partition
from flowtrain.scheduler.cost import eq3
from flowtrain.scheduler.encode_batches import make_encode_batches
from flowtrain.scheduler.step_planner import StepPlanner
from flowtrain.simulator.consumers import Backbone
from flowtrain.simulator.encoders import EncodedStep
from flowtrain.simulator.flow_run import Disturbances, FlowWorld
from flowtrain.simulator.run import StepWork
from flowtrain.simulator.samples import DrawnSamples, RepeatedPlanner, SampleKind
from flowtrain.simulator.step import StepSimulator
from flowtrain.simulator.virtual import Clock
from flowtrain.simulator.virtual_encoders import EncoderGroup
from flowtrain.simulator.virtual_feeders import FeederGroup
from flowtrain.types.plan import Degrees, StepPlan, Unit, UnitKind
from flowtrain.types.run_plan import ENCODER_MODES, Mode
from flowtrain.types.samples import TEXT_PART, PartSize, SamplerState
from tests.simulator.test_step import DEPTH, action_times

VISION = "vision"
ALIGNMENT = 256
SPACE = AddressSpace(num_processes=4096, segment_nbytes=1 << 40)
CAPACITY, MAX_PATCHES = 4096, 512
ROW_NBYTES = 100
PLENTY = 1 << 39
LARGEST_LEASE = 1024 * ROW_NBYTES + ALIGNMENT
"""Bytes of the largest batch: one sample alone."""


def kind_of(tokens: int, patches: int) -> SampleKind:
    parts = [PartSize(TEXT_PART, 1, 0, tokens, 8 * tokens)]
    if patches:
        parts.append(PartSize(VISION, 1, patches, patches, ROW_NBYTES * patches))
    return SampleKind(tokens, patches, tokens - patches, tuple(parts), (3 * patches,) if patches else ())


def drawn_samples(random: Random, *, batch_size: int = 6, num_batches: int = 2, alike: bool = False) -> DrawnSamples:
    """alike: every sample has as many patches as a batch may have, so every encode batch has one sample."""
    kinds = []
    for _ in range(5):
        patches = MAX_PATCHES if alike else random.choice([0, 64, 256, 400, 1024])
        kinds.append(kind_of(patches + random.randint(16, 1024), patches))
    rows = [[random.randrange(len(kinds)) for _ in range(batch_size)] for _ in range(num_batches)]
    return DrawnSamples(kinds, np.array(rows))


def text_only(samples: DrawnSamples) -> DrawnSamples:
    """The same samples as they are sized where nobody reads images."""
    kinds = [replace(kind, parts=kind.parts[:1], image_nbytes=()) for kind in samples.kinds]
    return DrawnSamples(kinds, np.array(samples._rows))


@dataclass
class Record:
    """When the flow learned or answered something, by position; and what units consumed."""

    sized: dict[int, float] = field(default_factory=dict)
    leased: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    ready: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    located: dict[int, float] = field(default_factory=dict)
    consumed: dict[int, float] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)

    def watch(self, flow: Flow, clock: Clock) -> Flow:
        feed, lease_order, hand_in, consume = flow.feed, flow.lease_order, flow.hand_in, flow.consume
        locate = flow.microbatches.locate

        def watched_feed(owner, report):
            for sample in report.sized:
                assert sample.position not in self.sized
                self.sized[sample.position] = clock()
            return feed(owner, report)

        def watched_lease(*arguments):
            order = lease_order(*arguments)
            if order is not None and order.lease is not None:
                for position in order.lease.needed:
                    self.leased[position].append(clock())
            return order

        def watched_hand_in(owner, report):
            for each in report.ready:
                self.ready[each.position].append(clock())
            return hand_in(owner, report)

        def watched_locate(*arguments):
            found = locate(*arguments)
            for location in found:
                for part in location.parts:
                    self.located[part.position] = clock()
            return found

        def watched_consume(unit):
            rows, planned, state = consume(unit)
            for row in rows:
                assert row.position not in self.consumed and row.state == "consumed"
                self.consumed[row.position] = clock()
            self.order += [row.position for row in rows]
            return rows, planned, state

        flow.feed, flow.lease_order, flow.hand_in = watched_feed, watched_lease, watched_hand_in  # type: ignore
        flow.consume, flow.microbatches.locate = watched_consume, watched_locate  # type: ignore
        return flow


def simulator_of(dp: int, pp: int) -> StepSimulator:
    return StepSimulator(build_partition(DEPTH, pp), action_times(Degrees(dp, pp, 1)))


def planner_of(dp: int, *, has_encode_batches: bool = True) -> StepPlanner:
    return StepPlanner(
        dp,
        CAPACITY,
        "best_fit_balanced",
        eq3(CAPACITY),
        2,
        "lpt",
        {VISION: MAX_PATCHES},
        ALIGNMENT,
        has_encode_batches=has_encode_batches,
    )


def works_of(plan: StepPlan) -> MicrobatchColumns:
    """Those of a replica after those of the one before."""
    works = []
    for rank in range(plan.dp_size):
        for slot in range(plan.num_slots):
            samples = plan.microbatch(slot, rank).samples
            lengths = tuple(each.num_tokens for each in samples)
            vision = sum(each.num_vision_tokens for each in samples)
            works.append(MicrobatchWork(lengths, vision, sum(each.num_target_tokens for each in samples)))
    return MicrobatchColumns.of(works)


def step_of(simulator: StepSimulator, samples: DrawnSamples) -> Callable[[StepPlan], StepWork]:
    made: dict[object, StepWork] = {}

    def work(plan: StepPlan) -> StepWork:
        key = plan.lengths, plan.ends
        if key not in made:
            made[key] = StepWork(simulator.named("1f1b", plan.num_slots, plan.dp_size), works_of(plan))
        return made[key]

    return work


def encoded_steps(samples: DrawnSamples, dp: int, patch_s: float) -> list[tuple[StepPlan, EncodedStep]]:
    """Each batch's plan, and its encode batches with those that each slot needs."""
    found = []
    for batch in range(samples.num_batches):
        positions = range(batch * samples.batch_size, (batch + 1) * samples.batch_size)
        unit = Unit(batch, UnitKind.TRAIN, batch + 1, positions.start, len(positions))
        plan = planner_of(dp).plan(unit, samples.sized(positions))
        needed = []
        for slot in range(plan.num_slots):
            until = {p for each in range(slot + 1) for rank in range(dp) for p in plan.microbatch_positions(each, rank)}
            needed.append(sum(1 for each in plan.encode_batches if until & set(each.positions)))
        seconds = tuple(patch_s * each.num_patches for each in plan.encode_batches)
        found.append((plan, EncodedStep(np.array(seconds), np.array(needed))))
    return found


def world_of(
    samples: DrawnSamples,
    simulator: StepSimulator,
    dp: int,
    *,
    record: Record | None = None,
    num_steps: int = 5,
    mode: Mode = "decoupled",
    arrival: bool = False,
    encoders: int = 2,
    patch_s: float = 1e-5,
    decode_share: float = 0.0,
    segment_nbytes: int = PLENTY,
    feeders: int = 1,
    sample_s: float = 0.0,
    feeder_nbytes: int | None = None,
    lookahead: int = 1,
    prefetch: int = 3,
    disturbances: Disturbances | None = None,
) -> FlowWorld:
    """A run of these samples. patch_s: seconds of an encoder for a patch; decode_share: of it, to decode besides."""
    with_encoders = mode in ENCODER_MODES
    if mode == "llm_only":
        samples = text_only(samples)
    planner = RepeatedPlanner(planner_of(dp, has_encode_batches=with_encoders), samples)

    def make_flow(clock: Clock) -> Flow:
        parts = Parts(
            SPACE,
            alignment=ALIGNMENT,
            lease_timeout_s=1e9,
            keeps_batches=not arrival,
            ranks_read_images=mode == "monolithic",
            clock=clock,
        )
        make_batches = partial(make_encode_batches, max_batch_patches={VISION: MAX_PATCHES}, alignment=ALIGNMENT)
        by_arrival = ByArrival(
            ArrivalWindow(lookahead, num_steps), parts, make_batches if with_encoders else no_batches, SamplerState(0)
        )
        flow = assemble_flow(
            members=Members(SPACE.num_processes, 1024),
            parts=parts,
            order=by_arrival if arrival else InOrder(),
            planner=planner,
            units=unit_sequence(num_steps, samples.batch_size, None),
            lookahead=lookahead,
            flops_of=lambda sizes: SampleFlops(sizes.positions, *np.ones((3, len(sizes)))),
            sampler_state=SamplerState(0),
            dp_size=dp,
            num_feeders=feeders,
            whole_units=mode == "disaggregated",
        )
        return flow if record is None else record.watch(flow, clock)

    seconds: Sequence[float] = [patch_s * kind.num_vision_tokens for kind in samples.kinds]
    decode = [decode_share * each for each in seconds]
    group = EncoderGroup(VISION, encoders, decode, seconds, segment_nbytes)
    return FlowWorld(
        make_flow=make_flow,
        space=SPACE,
        alignment=ALIGNMENT,
        samples=samples,
        feeders=FeederGroup(feeders, sample_s, feeder_nbytes),
        encoders=(group,) if with_encoders else (),
        backbone=Backbone(simulator, step_of(simulator, samples), dp, num_steps, prefetch, lookahead),
        disturbances=disturbances or Disturbances(),
    )
