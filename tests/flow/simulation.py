"""Simulated feeder, encoders and ranks for a flow. They produce no data, but each producer has a real arena.

Every sample is a function of its position, so a part that is produced again has the same size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from flowtrain.costs.flops import SampleFlops
from flowtrain.flow.build import assemble_flow
from flowtrain.flow.consumed import ConsumedPositions
from flowtrain.flow.flow import Flow
from flowtrain.flow.members import Members
from flowtrain.flow.order import ArrivalWindow, ByArrival, InOrder
from flowtrain.flow.parts import Parts
from flowtrain.flow.units import unit_sequence
from flowtrain.mempool.arena import Arena, Hold
from flowtrain.mempool.gva import AddressSpace
from flowtrain.scheduler.cost import eq3
from flowtrain.scheduler.encode_batches import make_encode_batches
from flowtrain.scheduler.step_planner import StepPlanner
from flowtrain.types.memory import Extent, PoolStats, Tier
from flowtrain.types.messages import (
    EncoderReport,
    FeedReport,
    Lease,
    LeaseOrder,
    MicrobatchLocation,
    PartReady,
    RankReport,
)
from flowtrain.types.plan import Unit, UnitKind
from flowtrain.types.samples import TEXT_PART, PartSize, Rejection, RejectReason, SampleRef, SamplerState, SizedSample

ALIGNMENT = 64
SPACE = AddressSpace(num_processes=4000, segment_nbytes=1 << 20)
VISION = "vision"
BATCH = 4
MAX_BATCH_PATCHES = 8
LIMITS = {VISION: MAX_BATCH_PATCHES}
ENCODER_NBYTES = 2 * MAX_BATCH_PATCHES * ALIGNMENT
"""Room for two largest batches, so two encoders just hold a worst-case unit."""
ARRIVAL_NBYTES = 12 * ALIGNMENT
"""Room for one largest lease (7 * 64 bytes) and a bit more than half of BATCH - 1 largest samples."""
TEXT_NBYTES = 1 << 14
LEASE_TIMEOUT_S = 60.0


def ref_of(position: int) -> SampleRef:
    return SampleRef(position, 0, position % 1000, 0)


def sample_of(position: int) -> SizedSample:
    """Lengths and images differ between positions; one in four has no image."""
    patches = (3, 0, 1, 4, 2, 4, 0, 3)[position % 8]
    tokens = 4 + patches + position % 5
    parts = [PartSize(TEXT_PART, 1, 0, tokens, 8 * tokens)]
    if patches:
        parts.append(PartSize(VISION, 1, patches, patches, 48 * patches))
    return SizedSample(ref_of(position), tokens, patches, 2, tuple(parts))


def is_found_bad_early(position: int) -> bool:
    return position % 11 == 7


def is_found_bad_late(position: int) -> bool:
    return position % 13 == 5 and sample_of(position).num_vision_tokens > 0


def rejection_of(position: int) -> Rejection:
    return Rejection(ref_of(position), RejectReason.CORRUPT_IMAGE, "torn")


def build_flow(
    *,
    num_steps: int = 3,
    eval_every: int | None = None,
    num_eval: int = 0,
    start_step: int = 0,
    sampler_state: SamplerState | None = None,
    arrival: bool = False,
    lookahead: int = 1,
    dp_size: int = 2,
    replica_size: int = 1,
    trace_steps: int = 0,
    clock: Callable[[], float] = lambda: 0.0,
) -> Flow:
    """Return a flow over ``num_steps`` steps of ``BATCH`` samples. sampler_state: after ``start_step``, by arrival."""
    state = sampler_state or SamplerState(start_step * BATCH)
    parts = Parts(
        SPACE,
        alignment=ALIGNMENT,
        lease_timeout_s=LEASE_TIMEOUT_S,
        consumed=ConsumedPositions.at(state),
        clock=clock,
    )
    before = unit_sequence(start_step, BATCH, None, eval_every, num_eval, state.next_position // BATCH)
    make_batches = partial(make_encode_batches, max_batch_patches=LIMITS, alignment=ALIGNMENT)
    window = ArrivalWindow(lookahead, num_steps, eval_every)
    return assemble_flow(
        members=Members(SPACE.num_processes, SPACE.num_processes),
        parts=parts,
        order=ByArrival(window, parts, make_batches, state) if arrival else InOrder(),
        planner=StepPlanner(dp_size, 16, "best_fit", eq3(16), 2, "zigzag", LIMITS, ALIGNMENT),
        units=unit_sequence(num_steps, BATCH, None, eval_every, num_eval, start_step),
        leftovers=(unit for unit in before if unit.kind is UnitKind.TRAIN),
        lookahead=lookahead,
        flops_of=lambda sizes: SampleFlops(sizes.positions, *np.ones((3, len(sizes)))),
        sampler_state=state,
        dp_size=dp_size,
        replica_size=replica_size,
        last_traced_step=start_step + trace_steps,
    )


def located(flow: Flow, unit: int, slot: int | None, rank: int) -> MicrobatchLocation | None:
    """Return where one microbatch lies, or None while it must wait."""
    return next(iter(flow.microbatches.locate(unit, slot, rank)), None)


def report_of(unit: Unit, dp_rank: int) -> RankReport:
    rate = 0.1 if unit.kind is UnitKind.TRAIN else None
    return RankReport(unit.index, unit.kind, unit.step, dp_rank, 1.0, rate, rate, 4, 40, 8, 0.0, 1.0, 0.0, 0.0)


class Owner:
    """A process that gives memory."""

    def __init__(self, index: int, nbytes: int) -> None:
        self.index = index
        self.arena = Arena(nbytes, ALIGNMENT, "knob")

    def put(self, nbytes: int, hold: Hold | None = None) -> tuple[Extent, ...]:
        return tuple(
            Extent(SPACE.gva(Tier.DRAM, self.index, offset), length)
            for offset, length in self.arena.allocate(nbytes, hold)
        )

    def free(self, extents: tuple[Extent, ...]) -> None:
        """Free extents; the arena refuses a second free."""
        self.arena.free([(SPACE.translate(extent.gva).offset, extent.nbytes) for extent in extents])

    def has(self, extent: Extent) -> bool:
        return self.arena.is_used(SPACE.translate(extent.gva).offset, extent.nbytes)

    @property
    def stats(self) -> PoolStats:
        arena = self.arena
        return PoolStats(
            arena.bound_nbytes, arena.used_nbytes, arena.free_nbytes, arena.largest_free_nbytes, arena.num_runs
        )


class SimulatedFeeder(Owner):
    """Sizes units. ``make`` is the work between an order and its report."""

    def __init__(self, index: int, nbytes: int = TEXT_NBYTES) -> None:
        super().__init__(index, nbytes)
        self.report: FeedReport | None = FeedReport()

    def text(self, position: int) -> PartReady:
        return PartReady(position, TEXT_PART, 0, self.put(sample_of(position).parts[0].nbytes))

    def make(self, unit: Unit | None, remake: tuple[SampleRef, ...], consumed: tuple[int, ...] = ()) -> FeedReport:
        remade = tuple(self.text(ref.position) for ref in remake)
        if unit is None:
            return FeedReport(remade=remade, stats=self.stats)
        wanted = [position for position in unit.positions if position not in consumed]
        good = [position for position in wanted if not is_found_bad_early(position)]
        return FeedReport(
            unit=unit,
            sized=tuple(sample_of(position) for position in good),
            texts=tuple(self.text(position) for position in good),
            rejections=tuple(rejection_of(position) for position in wanted if is_found_bad_early(position)),
            sampler_state=SamplerState(unit.step * BATCH),
            remade=remade,
            stats=self.stats,
        )


class SimulatedEncoder(Owner):
    """Leases batches and encodes them in that order."""

    def __init__(self, index: int, nbytes: int = ENCODER_NBYTES) -> None:
        super().__init__(index, nbytes)
        self.work: list[tuple[Lease, Hold]] = []

    def take(self, order: LeaseOrder | None) -> None:
        if order is None:
            return
        self.free(order.released)
        if order.lease is not None:
            self.work.append((order.lease, self.arena.hold(order.lease.nbytes)))

    def encode(self) -> EncoderReport:
        """Encode the first leased batch."""
        lease, hold = self.work.pop(0)
        good = [position for position in lease.needed if not is_found_bad_late(position)]
        ready = tuple(
            PartReady(position, VISION, lease.epoch, self.put(sample_of(position).parts[1].nbytes, hold))
            for position in good
        )
        self.arena.unhold(hold)
        # A batch is decoded whole, so it has all its bad images again, also known ones.
        bad = tuple(rejection_of(position) for position in lease.batch.positions if is_found_bad_late(position))
        return EncoderReport(ready, bad, self.stats, 0.5)


@dataclass
class SimulatedRank:
    """Runs units as a backbone rank does, one small move at a time."""

    flow: Flow
    rank: int
    arrival: bool
    unit: int
    replica_size: int = 1
    running: bool = False
    stopped: bool = False
    located: MicrobatchLocation | None = None
    released: set[int] = field(default_factory=set)
    answers: dict[int, bool] = field(default_factory=dict)
    ran: list[MicrobatchLocation] = field(default_factory=list)

    @property
    def dp_rank(self) -> int:
        return self.rank // self.replica_size

    def move(self, check: Callable[[MicrobatchLocation], None] = lambda location: None) -> bool:
        """Do the next step if possible; returns whether it was."""
        if self.stopped:
            return False
        if not self.running:
            self.running = self.answers[self.unit] = self.flow.steps.begin(self.unit)
            self.stopped = not self.running
            return True
        plan = self.flow.plan_of(self.unit)
        if plan is None:
            assert not self.flow.steps.is_past_end(self.unit), "a unit that was begun is planned in the end"
            return False
        if self.located is not None:
            check(self.located)
            self.flow.microbatches.release(self.unit, (self.located.slot,), self.rank)
            self.ran.append(self.located)
            self.released.add(self.located.slot)
            self.located = None
        elif len(self.released) < len(plan.slots):
            slot = None if self.arrival else len(self.released)
            self.located = located(self.flow, self.unit, slot, self.rank)
            if self.located is None:
                return False
            assert self.located.slot not in self.released
            check(self.located)
        else:
            self.flow.finish(report_of(plan.unit, self.dp_rank), ())
            self.released.clear()
            self.running = False
            self.unit += 1
        return True
