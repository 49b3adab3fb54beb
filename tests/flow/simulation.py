"""Simulated feeders, encoders and ranks for a flow. They produce no data, but each producer has a real arena.

Every sample is a function of its position, so a part that is produced again has the same size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from flowtrain.costs.flops import SampleFlops
from flowtrain.errors import OutOfPoolMemory
from flowtrain.flow.build import assemble_flow
from flowtrain.flow.consumed import ConsumedPositions
from flowtrain.flow.flow import Flow
from flowtrain.flow.members import Members
from flowtrain.flow.order import ArrivalWindow, ByArrival, InOrder, no_batches
from flowtrain.flow.parts import Parts
from flowtrain.flow.steps import Elsewhere
from flowtrain.flow.units import unit_sequence
from flowtrain.mempool.arena import Arena, Hold
from flowtrain.mempool.gva import AddressSpace
from flowtrain.scheduler.cost import eq3
from flowtrain.scheduler.encode_batches import make_encode_batches
from flowtrain.scheduler.layout import Arrange
from flowtrain.scheduler.step_planner import StepPlanner
from flowtrain.types.evaluation import EvalRounds
from flowtrain.types.memory import Extent, PoolStats, Tier
from flowtrain.types.messages import (
    EncoderReport,
    FeedReport,
    ImageBytes,
    Lease,
    LeaseOrder,
    MicrobatchLocation,
    PartReady,
    RankReport,
    Remake,
)
from flowtrain.types.plan import StepPlan, Unit, UnitKind
from flowtrain.types.run_plan import ENCODER_MODES, Mode
from flowtrain.types.samples import (
    IMAGES_PART,
    TEXT_PART,
    PartSize,
    Rejection,
    RejectReason,
    SampleRef,
    SamplerState,
    SizedSample,
)

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
FED_NBYTES = 1 << 14
"""Room of a feeder that never waits."""
LARGEST_FED_NBYTES = 2 * ALIGNMENT + 3 * ALIGNMENT
"""Text and images of the largest sample, each aligned."""
BLOCK_ROWS = 3
"""Rows of a block; all of them are fed by one feeder."""
LEASE_TIMEOUT_S = 60.0


def ref_of(position: int) -> SampleRef:
    return SampleRef(position, 0, position % 1000, 0)


def sample_of(position: int) -> SizedSample:
    """Lengths and images differ between positions; one in four has no image."""
    patches = (3, 0, 1, 4, 2, 4, 0, 3)[position % 8]
    tokens = 4 + patches + position % 5
    parts = [PartSize(TEXT_PART, 1, 0, tokens, 8 * tokens)]
    images: tuple[int, ...] = ()
    if patches:
        parts.append(PartSize(VISION, 1, patches, patches, 48 * patches))
        images = (30 * patches, 50 + position % 20) if patches > 1 else (25 + position % 50,)
    return SizedSample(ref_of(position), tokens, patches, 2, tuple(parts), images)


def fed_nbytes(position: int, part: str) -> int:
    """Bytes of a part that a feeder puts."""
    sample = sample_of(position)
    return sum(sample.image_nbytes) if part == IMAGES_PART else sample.parts[0].nbytes


def feeder_of(position: int, num_feeders: int) -> int:
    """The feeder of a position's block. Two blocks are open at a time, and their rows alternate."""
    return (position // (2 * BLOCK_ROWS) * 2 + position % 2) % num_feeders


def is_found_bad_early(position: int) -> bool:
    return position % 11 == 7


def is_found_bad_late(position: int) -> bool:
    return position % 13 == 5 and sample_of(position).num_vision_tokens > 0


def rejection_of(position: int) -> Rejection:
    return Rejection(ref_of(position), RejectReason.CORRUPT_IMAGE, "torn")


def text_only(sample: SizedSample) -> SizedSample:
    """A sample as it is sized where nobody reads its images."""
    return replace(sample, parts=sample.parts[:1], image_nbytes=())


def as_text(position: int) -> SizedSample:
    return text_only(sample_of(position))


def planner_of(dp_size: int, mode: Mode = "decoupled", arrange: Arrange | None = None) -> StepPlanner:
    batches = mode in ENCODER_MODES
    return StepPlanner(
        dp_size, 16, "best_fit", eq3(16), 2, "zigzag", LIMITS, ALIGNMENT, has_encode_batches=batches, arrange=arrange
    )


def build_flow(
    *,
    num_steps: int = 3,
    evaluations: tuple[EvalRounds, ...] = (),
    start_step: int = 0,
    sampler_state: SamplerState | None = None,
    arrival: bool = False,
    lookahead: int = 1,
    dp_size: int = 2,
    num_feeders: int = 1,
    trace_steps: int = 0,
    mode: Mode = "decoupled",
    in_turn: bool = False,
    clock: Callable[[], float] = lambda: 0.0,
    earlier: Flow | None = None,
    arrange: Arrange | None = None,
    elsewhere: Elsewhere | None = None,
) -> Flow:
    """Return a flow over ``num_steps`` steps of ``BATCH`` samples. sampler_state: after ``start_step``, by arrival.

    earlier: the flow whose processes it takes over.
    """
    state = sampler_state or SamplerState(start_step * BATCH)
    parts = Parts(
        SPACE,
        alignment=ALIGNMENT,
        lease_timeout_s=LEASE_TIMEOUT_S,
        keeps_batches=not arrival,
        consumed=ConsumedPositions.at(state),
        ranks_read_images=mode == "monolithic",
        clock=clock,
    )
    before = unit_sequence(start_step, BATCH, None, evaluations, state.next_position // BATCH)
    make_batches = partial(make_encode_batches, max_batch_patches=LIMITS, alignment=ALIGNMENT)
    if mode not in ENCODER_MODES:
        make_batches = no_batches  # type: ignore[assignment]
    window = ArrivalWindow(lookahead, num_steps, [each.every for each in evaluations])
    flow = assemble_flow(
        members=earlier.members if earlier is not None else Members(SPACE.num_processes, SPACE.num_processes),
        parts=parts,
        order=ByArrival(window, parts, make_batches, state) if arrival else InOrder(),
        planner=planner_of(dp_size, mode, arrange),
        elsewhere=elsewhere,
        units=unit_sequence(num_steps, BATCH, None, evaluations, start_step),
        leftovers=(unit for unit in before if unit.kind is UnitKind.TRAIN),
        lookahead=lookahead,
        flops_of=lambda sizes: SampleFlops(sizes.positions, *np.ones((3, len(sizes)))),
        sampler_state=state,
        dp_size=dp_size,
        num_feeders=num_feeders,
        last_traced_step=start_step + trace_steps,
        whole_units=mode == "disaggregated" or in_turn,
        in_turn=in_turn,
    )
    if earlier is not None:
        flow.take_over(earlier)
    return flow


def located(flow: Flow, unit: int, slot: int | None, dp_rank: int) -> MicrobatchLocation | None:
    """Return where one microbatch lies, or None while it must wait."""
    return next(iter(flow.microbatches.locate(unit, slot, dp_rank)), None)


def check_whole(flow: Flow, plan: StepPlan) -> None:
    """No part of a unit is missing, except of positions that are read."""
    for position in plan.positions:
        record = flow.parts[position]
        assert record.microbatch is not None
        assert record.microbatch.is_released or flow.parts.is_done(position), "a unit was begun before it was whole"


def report_of(unit: Unit, dp_rank: int) -> RankReport:
    rate = 0.1 if unit.kind is UnitKind.TRAIN else None
    return RankReport(unit.index, unit.kind, unit.step, dp_rank, 1.0, rate, rate, 4, 40, 8, 0.0, 1.0, 0.0, 0.0)


class Owner:
    """A process that gives memory. Its segment outlives it."""

    def __init__(self, index: int, nbytes: int) -> None:
        self.index = index
        self.arena = Arena(nbytes, ALIGNMENT, "knob")
        self.contents: dict[Extent, tuple[int, str]] = {}  # extent -> (position, part)

    def put(self, position: int, part: str, nbytes: int, hold: Hold | None = None) -> tuple[Extent, ...]:
        extents = tuple(
            Extent(SPACE.gva(Tier.DRAM, self.index, offset), length)
            for offset, length in self.arena.allocate(nbytes, hold)
        )
        self.contents.update(dict.fromkeys(extents, (position, part)))
        return extents

    def free(self, extents: tuple[Extent, ...]) -> None:
        """Free extents; the arena refuses a second free."""
        self.arena.free([(SPACE.translate(extent.gva).offset, extent.nbytes) for extent in extents])
        for extent in extents:
            del self.contents[extent]

    def has(self, extent: Extent) -> bool:
        return self.arena.is_used(SPACE.translate(extent.gva).offset, extent.nbytes)

    @property
    def stats(self) -> PoolStats:
        arena = self.arena
        return PoolStats(
            arena.bound_nbytes, arena.used_nbytes, arena.free_nbytes, arena.largest_free_nbytes, arena.num_runs
        )


class SimulatedFeeder(Owner):
    """Sizes its share of units. ``begin`` and ``work`` are the work between an order and its report."""

    def __init__(
        self,
        index: int,
        nbytes: int = FED_NBYTES,
        number: int = 0,
        num_feeders: int = 1,
        keeps_images: bool = True,
    ) -> None:
        super().__init__(index, nbytes)
        self.number = number
        self._keeps_images = keeps_images
        self._num_feeders = num_feeders
        self.report: FeedReport | None = FeedReport()
        self._unit: Unit | None = None
        self._sized: list[int] = []
        self._rejected: list[int] = []
        self._todo: deque[tuple[int, str]] = deque()
        self._put: list[PartReady] = []

    @property
    def is_busy(self) -> bool:
        """Whether it has parts to put."""
        return bool(self._todo)

    def begin(self, unit: Unit | None, remake: tuple[Remake, ...], consumed: tuple[int, ...] = ()) -> None:
        """Start on an order."""
        assert not self.is_busy and (unit is None or not remake)
        mine = [p for p in unit.positions if feeder_of(p, self._num_feeders) == self.number] if unit is not None else []
        wanted = [position for position in mine if position not in consumed]
        self._unit, self._put = unit, []
        self._sized = [position for position in wanted if not is_found_bad_early(position)]
        self._rejected = [position for position in wanted if is_found_bad_early(position)]
        self._todo.extend((lost.ref.position, part) for lost in remake for part in lost.parts)
        for position in self._sized:
            self._todo.append((position, TEXT_PART))
            if sample_of(position).image_nbytes and self._keeps_images:
                self._todo.append((position, IMAGES_PART))

    def work(self, flow: Flow) -> None:
        """Put what there is room for; ``report`` is there once all is put. It waits for room as a feeder does."""
        while self._todo:
            position, part = self._todo[0]
            try:
                extents = self.put(position, part, fed_nbytes(position, part))
            except OutOfPoolMemory:
                order = flow.room_order(self.index)
                if order is None:
                    return
                self.free(order.released)
                if order.stop:
                    self._give_up()
                    return
                assert order.released
            else:
                self._todo.popleft()
                self._put.append(PartReady(position, part, 0, extents))
        self.report = self._report()

    def make(self, unit: Unit | None, remake: tuple[Remake, ...], consumed: tuple[int, ...] = ()) -> FeedReport:
        """Do the work at once, with room for all of it."""
        self.begin(unit, remake, consumed)
        for position, part in self._todo:
            extents = self.put(position, part, fed_nbytes(position, part))
            self._put.append(PartReady(position, part, 0, extents))
        self._todo.clear()
        return self._report()

    def _report(self) -> FeedReport:
        put, unit = tuple(self._put), self._unit
        if unit is None:
            return FeedReport(remade=put, stats=self.stats)
        return FeedReport(
            unit=unit,
            sized=tuple(map(sample_of if self._keeps_images else as_text, self._sized)),
            texts=tuple(ready for ready in put if ready.part == TEXT_PART),
            images=tuple(ready for ready in put if ready.part == IMAGES_PART),
            rejections=tuple(rejection_of(position) for position in self._rejected),
            sampler_state=SamplerState(unit.step * BATCH),
            stats=self.stats,
        )

    def _give_up(self) -> None:
        """The run is over: free what was put for nothing."""
        for ready in self._put:
            self.free(ready.extents)
        self._todo.clear()


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

    def encode(self, feeders: Mapping[int, Owner] | None = None) -> EncoderReport:
        """Encode the first leased batch.

        feeders: segments that it can read, by process; None: it finds every image. A batch with images elsewhere is
            returned. Images that were overwritten are bad.
        """
        lease, hold = self.work.pop(0)
        bad = {ref.position for ref in lease.refs if is_found_bad_late(ref.position)}
        if feeders is not None:
            if any(process_of(where) not in feeders for where in lease.images):
                self.arena.unhold(hold)
                return EncoderReport(returned=lease.lease_id, stats=self.stats)
            bad |= {ref.position for ref, where in images_of(lease) if not is_read(where, ref.position, feeders)}
        good = [position for position in lease.needed if position not in bad]
        ready = tuple(
            PartReady(
                position, VISION, lease.epoch, self.put(position, VISION, sample_of(position).parts[1].nbytes, hold)
            )
            for position in good
        )
        self.arena.unhold(hold)
        # A batch is decoded whole, so it has all its bad images again, also known ones.
        return EncoderReport(
            ready,
            tuple(rejection_of(position) for position in sorted(bad)),
            self.stats,
            lease_id=lease.lease_id,
        )


def images_of(lease: Lease) -> list[tuple[SampleRef, ImageBytes]]:
    """The samples of a lease, with the places of their images."""
    return list(zip(lease.refs, lease.images, strict=True))


def process_of(images: ImageBytes) -> int:
    """The process in whose segment images lie."""
    return SPACE.translate(images.extents[0].gva).process_index


def is_read(images: ImageBytes, position: int, feeders: Mapping[int, Owner]) -> bool:
    """Whether the place of a position's images still has them."""
    contents = feeders[process_of(images)].contents
    return all(contents.get(extent) == (position, IMAGES_PART) for extent in images.extents)


@dataclass
class SimulatedReplica:
    """Runs units as a replica does, one small move at a time: its reader goes ahead, its training follows.

    ahead: units that its reader may be ahead of its training.
    limit: microbatches that it locates at once.
    """

    flow: Flow
    dp_rank: int
    arrival: bool
    unit: int
    ahead: int = 0
    limit: int = 1
    running: bool = False
    stopped: bool = False
    located: deque[MicrobatchLocation] = field(default_factory=deque)
    lost: deque[int] = field(default_factory=deque)
    read: dict[int, set[int]] = field(default_factory=dict)
    answers: dict[int, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reading = self.unit

    @property
    def num_read(self) -> int:
        """Microbatches of the unit that it reads which it has read."""
        return len(self.read.get(self.reading, ()))

    def move(self, check: Callable[[MicrobatchLocation], bool] = lambda location: True) -> bool:
        """Let the reader and the training do their next step if they can; returns whether one did.

        check: whether a microbatch is still where it was located.
        """
        if self.stopped:
            return False
        has_read = self._read(check)
        return self._train() or has_read

    def _train(self) -> bool:
        if not self.running:
            self.running = self.answers[self.unit] = self.flow.steps.begin(self.unit)
            self.stopped = not self.running
            return True
        plan = self.flow.plan_of(self.unit)
        if plan is None:
            assert not self.flow.steps.is_past_end(self.unit), "a unit that was begun is planned in the end"
            return False
        if len(self.read.get(self.unit, ())) < plan.num_slots:
            return False
        self.flow.finish((report_of(plan.unit, self.dp_rank),), ())
        del self.read[self.unit]
        self.running = False
        self.unit += 1
        return True

    def _read(self, check: Callable[[MicrobatchLocation], bool]) -> bool:
        if self.located:
            location = self.located.popleft()
            if not check(location):
                self.lost.append(location.slot)
                return True
            read = [part.position for part in location.parts if part.part == IMAGES_PART]
            bad = tuple(rejection_of(position) for position in read if is_found_bad_late(position))
            self.flow.reject(self.dp_rank, bad)
            self.flow.microbatches.release(location.unit, (location.slot,), self.dp_rank)
            done = self.read.setdefault(location.unit, set())
            assert location.slot not in done
            done.add(location.slot)
            plan = self.flow.plan_of(location.unit)
            assert plan is not None
            self.reading += len(done) == plan.num_slots
            return True
        if self.reading >= self.unit + self.ahead + self.running:
            return False
        plan = self.flow.plan_of(self.reading)
        if plan is None:
            return False
        slot = self.lost[0] if self.lost else None if self.arrival else self.num_read
        found = self.flow.microbatches.locate(self.reading, slot, self.dp_rank, 1 if self.lost else self.limit)
        if self.lost and found:
            self.lost.popleft()
        if found and self.flow.microbatches.whole_units:
            check_whole(self.flow, plan)
        self.located.extend(found)
        return bool(found)
