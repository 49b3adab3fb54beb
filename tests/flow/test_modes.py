"""What each mode changes in the flow: when a unit may start, which parts ranks read, and who finds bad images."""

from __future__ import annotations

import pytest

from flowtrain.errors import PoolError
from flowtrain.flow.eviction import make_room
from flowtrain.flow.microbatches import Microbatches
from flowtrain.flow.parts import Parts
from flowtrain.mempool.gva import AddressSpace
from flowtrain.types.memory import Extent, Tier
from flowtrain.types.messages import PartReady
from flowtrain.types.plan import StepPlan
from flowtrain.types.samples import IMAGES_PART, TEXT_PART, SizedSample
from tests.flow.building import ALIGNMENT, IMAGES, VISION, plan, ref, rejection, sized, vision_nbytes

SPACE = AddressSpace(num_processes=8, segment_nbytes=1 << 20)
FEEDER, ENCODER, NEXT_FEEDER, NEXT_ENCODER = range(4)


class World:
    """One unit of four samples with images, on two replicas, and a unit of two after it."""

    def __init__(self, *, whole_units: bool = False, ranks_read_images: bool = False, per_batch: int = 1) -> None:
        self.parts = Parts(
            SPACE, alignment=ALIGNMENT, lease_timeout_s=60.0, ranks_read_images=ranks_read_images, clock=lambda: 0.0
        )
        self.parts.leases.add_feeder(FEEDER, 0)
        self.microbatches = Microbatches(self.parts, whole_units)
        self.samples = [sized(position, 256) for position in range(6)]
        self.next_offset = 0
        for sample in self.samples:
            where = self.put(FEEDER, sample.parts[0].nbytes), self.put(FEEDER, sum(IMAGES))
            text, images = (
                PartReady(sample.position, name, 0, extents)
                for name, extents in zip((TEXT_PART, IMAGES_PART), where, strict=True)
            )
            self.parts.add_sized([sample], FEEDER, [text], [images])
        self.plans = [
            self.plan(0, self.samples[:4], per_batch, ranks_read_images),
            self.plan(1, self.samples[4:], per_batch, ranks_read_images),
        ]

    def plan(self, index: int, samples: list[SizedSample], per_batch: int, without_batches: bool) -> StepPlan:
        made = plan(samples, index=index, first=samples[0].position, dp_size=2, per_batch=per_batch)
        if without_batches:
            made = StepPlan.of_slots(made.unit, made.microbatch_tokens, made.slots, ())
        self.microbatches.add(made)
        return made

    def put(self, owner: int, nbytes: int) -> tuple[Extent, ...]:
        extents = (Extent(SPACE.gva(Tier.DRAM, owner, self.next_offset), nbytes),)
        self.next_offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return extents

    def encode(self, encoder: int = ENCODER) -> int:
        """Encode the batch that is first in line; returns its first position."""
        lease = self.parts.leases.grant(encoder, VISION, 1 << 20)
        assert lease is not None
        for position in lease.needed:
            extents = self.put(encoder, vision_nbytes(self.samples[position]))
            self.parts.ready(encoder, PartReady(position, VISION, lease.epoch, extents))
        return lease.needed[0]

    def found(self, unit: int, slot: int, dp_rank: int) -> list[tuple[int, str]]:
        located = self.microbatches.locate(unit, slot, dp_rank)
        return [(part.position, part.part) for location in located for part in location.parts]


def test_a_whole_unit_is_located_only_when_its_last_part_is_ready() -> None:
    world = World(whole_units=True)
    for position in range(3):
        assert world.encode() == position
        assert not world.found(0, 0, 0) and not world.found(0, 0, 1)
    assert "waits for the whole unit: 1 parts: vision of position 3" in world.microbatches.describe_wait(0, 0, 0)
    assert world.encode() == 3
    assert world.found(0, 0, 0) == [(0, TEXT_PART), (0, VISION)]
    assert not world.found(1, 0, 0)


def test_a_rejected_sample_does_not_hold_its_unit_up() -> None:
    world = World(whole_units=True)
    for _ in range(3):
        world.encode()
    assert world.parts.reject(rejection(3))
    assert world.found(0, 0, 1) == [(1, TEXT_PART), (1, VISION)]


def test_a_unit_that_lost_a_part_waits_for_it_again_and_not_for_what_is_read() -> None:
    world = World(whole_units=True)
    for _ in range(4):
        world.encode()
    assert world.found(0, 0, 0)
    world.microbatches.release(0, (0,), 0)
    world.parts.owner_lost(ENCODER)
    assert [world.encode(NEXT_ENCODER) for _ in range(2)] == [1, 2], "position 0 is read"
    assert not world.found(0, 0, 1)
    assert world.encode(NEXT_ENCODER) == 3
    assert world.found(0, 0, 1)


def test_no_part_of_the_first_unread_unit_is_evicted() -> None:
    world = World(whole_units=True)
    for _ in range(6):
        world.encode()
    world.parts.has_lost_memory = True
    first, *_ = (part for part in world.parts[0].parts if part.name == VISION)
    world.parts.evict(first)
    assert world.microbatches.kept_unit == 0
    assert make_room(world.parts, ENCODER, VISION, 0, world.microbatches.kept_unit)
    missing = [position for position in range(6) if not world.parts.is_done(position)]
    assert missing == [0, 5], "the last part of the later unit went"


def test_without_barrier_no_unit_is_kept() -> None:
    assert World().microbatches.kept_unit is None


def test_ranks_read_texts_and_images_where_no_encoder_does() -> None:
    world = World(ranks_read_images=True)
    assert world.parts.leases.grant(ENCODER, VISION, 1 << 20) is None
    (location,) = world.microbatches.locate(0, 0, 0)
    text, images = location.parts
    assert (text.part, text.pieces, text.ref) == (TEXT_PART, (), None)
    assert (images.part, images.pieces, images.ref) == (IMAGES_PART, IMAGES, ref(0))
    world.microbatches.release(0, (0,), 0)
    assert set(world.parts.holdings.take_released(FEEDER)) == {*text.extents, *images.extents}


def test_images_that_ranks_read_are_produced_again_when_their_feeder_dies() -> None:
    world = World(ranks_read_images=True)
    assert world.found(0, 0, 0)
    world.microbatches.release(0, (0,), 0)
    world.parts.owner_lost(FEEDER)
    assert not world.found(0, 0, 1)
    world.parts.leases.add_feeder(NEXT_FEEDER, 0)
    orders = world.parts.leases.grant_lost_parts(NEXT_FEEDER)
    assert [order.ref.position for order in orders] == [1, 2, 3, 4, 5], "position 0 is read"
    assert all(order.parts == (IMAGES_PART, TEXT_PART) for order in orders)
    for name, nbytes in ((TEXT_PART, 80), (IMAGES_PART, sum(IMAGES))):
        assert not world.found(0, 0, 1)
        world.parts.remade(NEXT_FEEDER, PartReady(1, name, 0, world.put(NEXT_FEEDER, nbytes)))
    assert world.found(0, 0, 1) == [(1, TEXT_PART), (1, IMAGES_PART)]


def test_the_replica_that_reads_a_sample_rejects_it_once() -> None:
    world = World(ranks_read_images=True)
    (location,) = world.microbatches.locate(0, 0, 1)
    assert not world.parts.reject(rejection(1)), "nobody else may: the replica knows where it lies"
    assert world.microbatches.reject(1, rejection(1))
    assert not world.microbatches.reject(1, rejection(1))
    extents = {extent for part in location.parts for extent in part.extents}
    assert set(world.parts.holdings.take_released(FEEDER)) == extents
    (again,) = world.microbatches.locate(0, 0, 1)
    assert again.rejected == (1,) and not again.parts
    for slot in range(2):
        for dp_rank in range(2):
            world.microbatches.locate(0, slot, dp_rank)
            world.microbatches.release(0, (slot,), dp_rank)
    rows = world.parts.consume(world.microbatches.end(0))
    assert [(row.position, row.state) for row in rows] == [
        (0, "consumed"),
        (1, "rejected"),
        (2, "consumed"),
        (3, "consumed"),
    ]


@pytest.mark.parametrize(
    ("dp_rank", "read", "why"),
    [
        (0, False, "replica 1 runs it"),
        (1, False, "does not know where it lies"),
        (1, True, "has read it before"),
    ],
)
def test_a_sample_that_could_have_been_trained_on_is_not_rejected(dp_rank: int, read: bool, why: str) -> None:
    world = World(ranks_read_images=True)
    if read:
        world.microbatches.locate(0, 0, 1)
        world.microbatches.release(0, (0,), 1)
    with pytest.raises(PoolError, match=why):
        world.microbatches.reject(dp_rank, rejection(1))
    assert not world.parts.is_rejected(1)


def test_a_bad_sample_whose_other_part_is_lost_is_rejected_too() -> None:
    world = World(ranks_read_images=True)
    assert world.found(0, 0, 0)
    world.parts.owner_lost(FEEDER)
    assert world.microbatches.reject(0, rejection(0))
    (again,) = world.microbatches.locate(0, 0, 0)
    assert again.rejected == (0,)
