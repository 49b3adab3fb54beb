"""The parts table under random deaths, expiries, rejections and slow reports, against an independent model.

Owners keep their bytes in a real ``Arena``, so that room is really short: two encoder segments just hold one worst-case
unit. One of the three encoders may be lost for good. Feeders may be lost together, also while they produce lost parts
again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flowtrain.errors import OutOfPoolMemory, StaleLeaseError
from flowtrain.flow.capacity import check_capacity
from flowtrain.flow.eviction import make_room
from flowtrain.mempool.arena import Arena, Hold
from flowtrain.mempool.gva import AddressSpace
from flowtrain.types.memory import Extent, Tier
from flowtrain.types.messages import Lease, MicrobatchLocation, PartReady
from flowtrain.types.plan import EncodeBatch, StepPlan
from flowtrain.types.samples import IMAGES_PART, TEXT_PART, SizedSample
from tests.flow.building import ALIGNMENT, IMAGES, VISION, Tables, aligned, plan, rejection, sized, vision_nbytes

SPACE = AddressSpace(num_processes=10_000, segment_nbytes=1 << 20)
NUM_ENCODERS, UNIT_SIZE, PER_BATCH, LARGEST, LOOKAHEAD, DP_SIZE = 3, 4, 2, 640, 3, 2
NUM_FEEDERS = 3
SEGMENT_NBYTES = PER_BATCH * LARGEST
TEXT_NBYTES = 80
LEASE_TIMEOUT_S = 60.0


@dataclass
class Work:
    """A lease and its holder's progress."""

    lease: Lease
    hold: Hold
    todo: list[int]


@dataclass
class Owner:
    """A process that gives memory."""

    index: int
    arena: Arena
    work: list[Work] = field(default_factory=list)
    lost: list[tuple[int, str]] = field(default_factory=list)
    """Lost parts that a feeder produces again."""

    def put(self, nbytes: int, hold: Hold | None = None) -> tuple[Extent, ...]:
        return tuple(Extent(SPACE.gva(Tier.DRAM, self.index, o), n) for o, n in self.arena.allocate(nbytes, hold))

    def free(self, extents: tuple[Extent, ...]) -> None:
        self.arena.free([(SPACE.translate(extent.gva).offset, extent.nbytes) for extent in extents])


class PartsMachine(RuleBasedStateMachine):
    """Three feeders, three encoders and two ranks. Each may be slow, and all except the ranks may die."""

    @initialize(keeps_batches=st.booleans())
    def start(self, keeps_batches: bool) -> None:
        self.now = 0.0
        self.keeps_batches = keeps_batches
        self.tables = Tables(SPACE, LEASE_TIMEOUT_S, lambda: self.now, keeps_batches)
        check_capacity([SEGMENT_NBYTES] * (NUM_ENCODERS - 1), PER_BATCH * LARGEST, UNIT_SIZE // PER_BATCH, "knob")
        self.num_owners = 0
        self.encoders = [self.new_owner(SEGMENT_NBYTES) for _ in range(NUM_ENCODERS)]
        self.feeders = [self.new_feeder(number) for number in range(NUM_FEEDERS)]
        self.batches: dict[int, EncodeBatch] = {}  # by position
        self.samples: dict[int, SizedSample] = {}
        self.rejected: set[int] = set()
        self.plans: dict[int, StepPlan] = {}
        self.next_unit = self.next_position = self.current = 0
        self.leased: dict[int, tuple[int, int]] = {}  # features -> (owner, lease id)
        self.ready: dict[tuple[int, str], tuple[int, tuple[Extent, ...]]] = {}  # part -> where it lies
        self.made_under: dict[int, int] = {}  # features -> the lease under which they were last produced
        self.given_up: set[int] = set()  # positions whose microbatch is released
        self.located: dict[tuple[int, int, int], MicrobatchLocation] = {}
        self.released: set[tuple[int, int, int]] = set()
        self.consumed: list[int] = []

    def new_owner(self, nbytes: int) -> Owner:
        self.num_owners += 1
        return Owner(self.num_owners - 1, Arena(nbytes, ALIGNMENT, "knob"))

    def new_feeder(self, number: int) -> Owner:
        owner = self.new_owner(1 << 16)
        self.tables.parts.leases.add_feeder(owner.index, number)
        return owner

    # --- feeding ------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.plans) < LOOKAHEAD)
    @rule(
        images=st.lists(st.integers(0, LARGEST) | st.just(LARGEST), min_size=1, max_size=UNIT_SIZE),
        bad=st.sets(st.integers(0, UNIT_SIZE - 1), max_size=2),
        per_microbatch=st.integers(1, 3),
    )
    def feed(self, images: list[int], bad: set[int], per_microbatch: int) -> None:
        first, unit = self.next_position, self.next_unit
        self.next_position += len(images)
        self.next_unit += 1
        samples = []
        for position, nbytes in enumerate(images, first):
            if position - first in bad:
                assert self.tables.parts.reject(rejection(position))
                self.rejected.add(position)
                continue
            sample = self.samples[position] = sized(position, nbytes, TEXT_NBYTES)
            feeder = self.feeder_of(position)
            for part, extents in self.tables.feed(sample, feeder.index, feeder.put).items():
                self.ready[position, part] = (feeder.index, extents)
            samples.append(sample)
        self.plans[unit] = plan(
            samples,
            index=unit,
            first=first,
            count=len(images),
            dp_size=DP_SIZE,
            per_microbatch=per_microbatch,
            per_batch=PER_BATCH,
        )
        self.tables.microbatches.add(self.plans[unit])
        self.batches.update({p: batch for batch in self.plans[unit].encode_batches for p in batch.positions})

    def feeder_of(self, position: int) -> Owner:
        return self.feeders[position // 2 % NUM_FEEDERS]

    @rule(which=st.integers(0, NUM_FEEDERS - 1))
    def take_lost_parts(self, which: int) -> None:
        feeder = self.feeders[which]
        missing = [
            part for part in self.missing_parts() if self.feeder_of(part[0]) is feeder and part not in feeder.lost
        ]
        orders = self.tables.parts.leases.grant_lost_parts(feeder.index)
        assert [(order.ref.position, part) for order in orders for part in order.parts] == missing
        feeder.lost += missing

    @rule(which=st.integers(0, NUM_FEEDERS - 1), pick=st.integers(0, 9))
    def remake(self, which: int, pick: int) -> None:
        feeder = self.feeders[which]
        if not feeder.lost:
            return
        position, part = lost = feeder.lost.pop(pick % len(feeder.lost))
        is_missing = lost in self.missing_parts()
        extents = feeder.put(self.nbytes_of(position, part))
        report = PartReady(position, part, 0, extents)
        if is_missing:
            self.tables.parts.remade(feeder.index, report)
            self.ready[lost] = (feeder.index, extents)
        else:
            with pytest.raises(StaleLeaseError):
                self.tables.parts.remade(feeder.index, report)
            feeder.free(extents)

    def missing_parts(self) -> list[tuple[int, str]]:
        """Return the parts that feeders must produce again, in order."""
        wanted = [(position, IMAGES_PART) for position in sorted(self.batches) if self.are_images_wanted(position)]
        wanted += [(position, TEXT_PART) for position in sorted(self.samples) if self.is_wanted(position)]
        return sorted(part for part in wanted if part not in self.ready)

    def are_images_wanted(self, position: int) -> bool:
        """Whether an encoder may need a position's images, apart from the leases that refer to them."""
        if position in self.rejected or not self.keeps_batches:
            return self.is_wanted(position)
        return any(self.is_wanted(other) for other in self.batches[position].positions)

    def nbytes_of(self, position: int, part: str) -> int:
        if part == IMAGES_PART:
            return sum(IMAGES)
        return vision_nbytes(self.samples[position]) if part == VISION else TEXT_NBYTES

    def forget_images(self) -> None:
        """Forget images that nobody needs; a lease keeps the images of its batch."""
        leased = {self.batches[position] for position in self.leased}
        for position, batch in self.batches.items():
            if not self.are_images_wanted(position) and batch not in leased:
                self.ready.pop((position, IMAGES_PART), None)

    # --- encoding -----------------------------------------------------------------------------------------------

    @rule(which=st.integers(0, NUM_ENCODERS - 1))
    def lease(self, which: int) -> None:
        owner = self.encoder(which)
        free = owner.arena.available_nbytes
        lease = self.tables.parts.leases.grant(owner.index, VISION, free)
        first = self.first_in_line()
        if lease is None:
            assert first is None or first[2] > free or self.is_unfed(first)
            self.make_room(owner, free)
            return
        assert first is not None and ((lease.batch.unit, lease.batch.index), lease.needed, lease.nbytes) == first
        assert not self.is_unfed(first)
        refs = tuple(ref.position for ref in lease.refs)
        assert refs == tuple(position for position in lease.batch.positions if self.are_images_wanted(position))
        for position, images in zip(refs, lease.images, strict=True):
            assert (images.extents, images.nbytes) == (self.ready[position, IMAGES_PART][1], IMAGES)
        owner.work.append(Work(lease, owner.arena.hold(lease.nbytes), list(lease.needed)))
        for position in lease.needed:
            self.leased[position] = (owner.index, lease.lease_id)

    def make_room(self, owner: Owner, free: int) -> None:
        """As the flow does when nothing could be leased: first free released parts, then evict."""
        if released := self.tables.parts.holdings.take_released(owner.index):
            owner.free(released)
            return
        expected = self.evictable(owner, free)
        assert make_room(self.tables.parts, owner.index, VISION, free) == bool(expected)
        evicted = self.tables.parts.holdings.take_released(owner.index)
        where = [self.ready.pop((position, VISION)) for position in expected]
        assert set(evicted) == {extent for _, extents in where for extent in extents}
        owner.free(evicted)

    def evictable(self, owner: Owner, free: int) -> list[int]:
        """Return the positions whose images are evicted: whole batches, last first, not read, until there is room."""
        first = self.first_in_line()
        if first is None or self.leased or len(self.encoders) == NUM_ENCODERS or self.is_unfed(first):
            return []
        read = self.read_positions()
        chosen: list[int] = []
        for batch in reversed([batch for unit in sorted(self.plans) for batch in self.plans[unit].encode_batches]):
            if free >= first[2] or (batch.unit, batch.index) <= first[0]:
                break
            here = [p for p in batch.positions if self.ready.get((p, VISION), (None,))[0] == owner.index]
            chosen += (gone := [p for p in here if p not in read])
            free += sum(aligned(vision_nbytes(self.samples[p])) for p in gone)
        return chosen if free >= first[2] else []

    def read_positions(self) -> set[int]:
        """Return the positions that a rank has located."""
        return {p for unit, slot, rank in self.located for p in self.plans[unit].microbatch_positions(slot, rank)}

    def encoder(self, which: int) -> Owner:
        return self.encoders[which % len(self.encoders)]

    def first_in_line(self) -> tuple[tuple[int, int], tuple[int, ...], int] | None:
        for unit in sorted(self.plans):
            for batch in self.plans[unit].encode_batches:
                needed = tuple(
                    p
                    for p in batch.positions
                    if p not in self.leased and (p, VISION) not in self.ready and self.is_wanted(p)
                )
                if needed:
                    nbytes = sum(aligned(vision_nbytes(self.samples[p])) for p in needed)
                    return (batch.unit, batch.index), needed, nbytes
        return None

    def is_unfed(self, batch: tuple[tuple[int, int], tuple[int, ...], int]) -> bool:
        """Whether images of a batch are lost. batch: as ``first_in_line``."""
        positions = self.batches[batch[1][0]].positions
        return any(self.are_images_wanted(p) and (p, IMAGES_PART) not in self.ready for p in positions)

    def is_wanted(self, position: int) -> bool:
        return position not in self.rejected and position not in self.given_up

    @rule(which=st.integers(0, NUM_ENCODERS - 1), pick=st.integers(0, 9), corrupt=st.integers(0, 9))
    def encode(self, which: int, pick: int, corrupt: int) -> None:
        owner = self.encoder(which)
        if not owner.work:
            return
        work = owner.work[pick % len(owner.work)]
        position = work.todo.pop(0)
        if corrupt == 0:
            self.reject(position)
        else:
            self.report(owner, work, position)
        if not work.todo:
            owner.arena.unhold(work.hold)
            owner.work.remove(work)

    def report(self, owner: Owner, work: Work, position: int) -> None:
        extents = owner.put(vision_nbytes(self.samples[position]), work.hold)
        report = PartReady(position, VISION, work.lease.epoch, extents)
        if self.leased.get(position) == (owner.index, work.lease.lease_id):
            self.tables.parts.ready(owner.index, report)
            self.ready[position, VISION] = (owner.index, extents)
            self.made_under[position] = work.lease.lease_id
            del self.leased[position]
            self.forget_images()
        else:
            with pytest.raises(StaleLeaseError):
                self.tables.parts.ready(owner.index, report)
            owner.free(extents)

    def reject(self, position: int) -> None:
        done = position in self.given_up or position in self.rejected or self.is_handed_out(position)
        assert self.tables.parts.reject(rejection(position)) == (not done)
        if not done:
            self.rejected.add(position)
            self.forget(position)

    def is_handed_out(self, position: int) -> bool:
        complete = all((position, part.name) in self.ready for part in self.samples[position].parts)
        return complete and any(
            part.position == position for location in self.located.values() for part in location.parts
        )

    def forget(self, position: int) -> None:
        self.leased.pop(position, None)
        self.ready.pop((position, TEXT_PART), None)
        self.ready.pop((position, VISION), None)
        self.forget_images()

    @precondition(lambda self: self.batches)
    @rule(pick=st.integers(0, 99))
    def reject_late(self, pick: int) -> None:
        """An encoder that lost its lease still reports what it has found."""
        known = [
            position for plan in self.plans.values() for position in plan.unit.positions if position in self.batches
        ]
        if known:
            self.reject(known[pick % len(known)])

    @rule(which=st.integers(0, NUM_ENCODERS - 1), pick=st.integers(0, 9))
    def give_back(self, which: int, pick: int) -> None:
        """An encoder cannot read the images of a lease, which it may have lost meanwhile."""
        owner = self.encoder(which)
        if not owner.work:
            return
        work = owner.work.pop(pick % len(owner.work))
        owner.arena.unhold(work.hold)
        self.tables.parts.give_back(owner.index, work.lease.lease_id)
        self.tables.parts.give_back(owner.index, work.lease.lease_id)
        self.take_back(work.lease)

    def take_back(self, lease: Lease) -> None:
        """A lease is no longer valid: all of it is produced again, except what a rank may read."""
        held = [position for position, (_, lease_id) in self.leased.items() if lease_id == lease.lease_id]
        for position in held:
            del self.leased[position]
        for position in set(lease.needed) - self.read_positions() if held else ():
            if self.made_under.get(position) == lease.lease_id:
                self.ready.pop((position, VISION), None)
        self.forget_images()

    @precondition(lambda self: self.plans)
    @rule()
    def everybody_encodes(self) -> None:
        """Encode until the segments are full, or nothing is left to do."""
        for _ in range(LOOKAHEAD * UNIT_SIZE):
            for which in range(len(self.encoders)):
                self.lease(which)
                while self.encoders[which].work:
                    self.encode(which, 0, corrupt=1)

    @precondition(lambda self: self.current in self.plans)
    @rule(num_slots=st.integers(1, 3), rank=st.integers(0, DP_SIZE - 1))
    def everybody_works(self, num_slots: int, rank: int) -> None:
        """Without faults a while: a rank reads some microbatches of the unit that comes next."""
        self.remake_all()
        self.take_released()
        self.everybody_encodes()
        keys = [(self.current, slot, rank) for slot in range(len(self.plans[self.current].slots))]
        for key in [key for key in keys if key not in self.released][:num_slots]:
            self.read(rank, key[1])
            if key in self.located:
                self.release_one(key)
        if self.is_over(self.current):
            self.consume()

    def remake_all(self) -> None:
        for which, feeder in enumerate(self.feeders):
            self.take_lost_parts(which)
            while feeder.lost:
                self.remake(which, 0)

    # --- faults -------------------------------------------------------------------------------------------------

    @rule(which=st.integers(0, NUM_ENCODERS - 1))
    def encoder_dies(self, which: int) -> None:
        dead = self.encoder(which)
        self.lose(dead)
        self.encoders[self.encoders.index(dead)] = self.new_owner(SEGMENT_NBYTES)

    @rule(which=st.sets(st.integers(0, NUM_FEEDERS - 1), min_size=1))
    def feeders_die(self, which: set[int]) -> None:
        for number in which:
            self.lose(self.feeders[number])
        for number in which:
            self.feeders[number] = self.new_feeder(number)

    @precondition(lambda self: len(self.encoders) == NUM_ENCODERS)
    @rule(which=st.integers(0, NUM_ENCODERS - 1))
    def die_for_good(self, which: int) -> None:
        self.lose(self.encoders[which], for_good=True)
        del self.encoders[which]

    def lose(self, dead: Owner, for_good: bool = False) -> None:
        self.tables.parts.owner_lost(dead.index, for_good)
        self.ready = {part: where for part, where in self.ready.items() if where[0] != dead.index}
        self.leased = {position: holder for position, holder in self.leased.items() if holder[0] != dead.index}
        for work in dead.work:
            report = PartReady(work.todo[0], VISION, work.lease.epoch, ())
            with pytest.raises(StaleLeaseError):
                self.tables.parts.ready(dead.index, report)
        for position, part in dead.lost:
            with pytest.raises(StaleLeaseError):
                self.tables.parts.remade(dead.index, PartReady(position, part, 0, ()))
        self.forget_images()
        assert self.tables.parts.holdings.take_released(dead.index) == ()
        assert self.tables.parts.leases.grant(dead.index, VISION, 1 << 30) is None
        assert not make_room(self.tables.parts, dead.index, VISION, 0)

    @rule(seconds=st.sampled_from([1.0, 30.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for lease in self.tables.parts.expire_leases():
            self.take_back(lease)

    # --- the backbone -------------------------------------------------------------------------------------------

    @precondition(lambda self: self.current in self.plans)
    @rule(rank=st.integers(0, DP_SIZE - 1), pick=st.integers(0, 9))
    def read(self, rank: int, pick: int) -> None:
        unit = self.current
        slot = pick % len(self.plans[unit].slots)
        key = (unit, slot, rank)
        if key in self.released:
            return
        planned = [sample.position for sample in self.plans[unit].slots[slot][rank].samples]
        expected = {
            (position, part.name)
            for position in planned
            if position not in self.rejected
            for part in self.samples[position].parts
        }
        location = self.tables.locate(unit, slot, rank)
        assert (location is not None) == self.tables.is_ready(unit, slot, rank) == (expected <= set(self.ready))
        assert (slot in self.tables.ready_slots(unit, rank)) == (location is not None)
        if location is None:
            assert "waits for" in self.tables.microbatches.describe_wait(unit, slot, rank)
            return
        assert {(part.position, part.part) for part in location.parts} == expected
        assert all(self.ready[part.position, part.part][1] == part.extents for part in location.parts)
        assert set(location.rejected) == set(planned) & self.rejected
        self.located[key] = location

    @precondition(lambda self: any(key not in self.released for key in self.located))
    @rule(pick=st.integers(0, 9))
    def release(self, pick: int) -> None:
        running = sorted(key for key in self.located if key not in self.released)
        self.release_one(running[pick % len(running)])

    def release_one(self, key: tuple[int, int, int]) -> None:
        unit, slot, rank = key
        self.tables.release(unit, slot, rank)
        self.released.add(key)
        for sample in self.plans[unit].slots[slot][rank].samples:
            self.given_up.add(sample.position)
            self.forget(sample.position)

    @rule()
    def take_released(self) -> None:
        for owner in (*self.encoders, *self.feeders):
            owner.free(self.tables.parts.holdings.take_released(owner.index))  # the arena refuses what is freed twice

    @precondition(lambda self: self.is_over(self.current))
    @rule()
    def consume(self) -> None:
        made = self.plans.pop(self.current)
        rows = self.tables.consume(self.current)
        self.current += 1
        self.batches = {p: batch for p, batch in self.batches.items() if batch.unit != made.unit.index}
        assert [row.position for row in rows] == list(made.unit.positions)
        for row in rows:
            assert row.state == ("rejected" if row.position in self.rejected else "consumed")
        self.consumed += [row.position for row in rows]
        for key in [key for key in self.located if key[0] == made.unit.index]:
            del self.located[key]
            self.released.discard(key)

    def is_over(self, unit: int) -> bool:
        if unit not in self.plans:
            return False
        slots = self.plans[unit].slots
        return all((unit, slot, rank) in self.released for slot in range(len(slots)) for rank in range(DP_SIZE))

    # --- what always holds ----------------------------------------------------------------------------------------

    @invariant()
    def every_position_is_consumed_once_and_in_order(self) -> None:
        assert self.consumed == list(range(len(self.consumed)))

    @invariant()
    def no_ready_byte_is_lost(self) -> None:
        owners = {owner.index: owner for owner in (*self.encoders, *self.feeders)}
        total = 0
        for (position, name), (owner, extents) in self.ready.items():
            total += self.nbytes_of(position, name)
            for extent in extents:
                assert owners[owner].arena.is_used(SPACE.translate(extent.gva).offset, extent.nbytes)
        assert self.tables.occupancy()[Tier.DRAM] == total

    @invariant()
    def a_leaseholder_always_has_its_room(self) -> None:
        for owner in self.encoders:
            assert owner.arena.available_nbytes >= 0

    def teardown(self) -> None:
        """Without further faults the run ends: no deadlock, and no byte is left over."""
        if not hasattr(self, "tables"):
            return
        for _ in range(200):
            if not self.plans:
                break
            self.take_released()
            self.remake_all()
            for which in range(len(self.encoders)):
                self.lease(which)
                while self.encoders[which].work:
                    self.encode(which, 0, corrupt=1)
            self.run_what_is_ready()
            self.no_ready_byte_is_lost()
        assert not self.plans, "stuck"
        for which in range(len(self.encoders)):
            while self.encoders[which].work:
                self.encode(which, 0, corrupt=1)
        self.take_released()
        for owner in (*self.encoders, *self.feeders):
            assert owner.arena.used_nbytes == 0
        assert len(self.consumed) == self.next_position

    def run_what_is_ready(self) -> None:
        for slot in range(len(self.plans[self.current].slots)):
            for rank in range(DP_SIZE):
                self.read(rank, slot)
        while any(key not in self.released for key in self.located):
            self.release(0)
        if self.is_over(self.current):
            self.consume()


TestPartsMachine = PartsMachine.TestCase


def test_the_model_notices_a_lack_of_room() -> None:
    """The machine's segments are really short: each holds one largest batch, so both together hold one unit."""
    arena = Arena(SEGMENT_NBYTES, ALIGNMENT, "knob")
    arena.hold(PER_BATCH * LARGEST)
    with pytest.raises(OutOfPoolMemory):
        arena.hold(1)
