"""Which parts are evicted after memory was lost for good. test_parts_machine.py covers it among other faults."""

from __future__ import annotations

from functools import partial

import pytest

from flowtrain.errors import StaleLeaseError
from flowtrain.flow.eviction import make_room
from flowtrain.mempool.gva import AddressSpace
from flowtrain.types.memory import Extent, Tier
from flowtrain.types.messages import Lease, PartReady
from flowtrain.types.samples import SizedSample
from tests.flow.building import ALIGNMENT, IMAGES, VISION, Tables, plan, sized

SPACE = AddressSpace(num_processes=16, segment_nbytes=1 << 20)
FEEDER, DEAD, SURVIVOR = 0, 1, 2
NBYTES = 2 * ALIGNMENT
NUM_UNITS = 4


def extent(owner: int, position: int, nbytes: int) -> Extent:
    return Extent(SPACE.gva(Tier.DRAM, owner, position * 1024), nbytes)


def fed_extents(position: int, nbytes: int) -> tuple[Extent, ...]:
    """Text and images of a position, told apart by their sizes."""
    return (Extent(SPACE.gva(Tier.DRAM, FEEDER, position * 1024 + 128 * (nbytes != 80)), nbytes),)


def report(owner: int, lease: Lease) -> list[PartReady]:
    return [PartReady(p, VISION, lease.epoch, (extent(owner, p, NBYTES),)) for p in lease.needed]


def encode(tables: Tables, owner: int) -> Lease:
    lease = tables.parts.leases.grant(owner, VISION, 1 << 20)
    assert lease is not None
    for ready in report(owner, lease):
        tables.parts.ready(owner, ready)
    return lease


@pytest.fixture
def tables() -> Tables:
    """Units 0 to 3 with two positions, a batch and a microbatch each. The first lies in DEAD's segment."""
    tables = Tables(SPACE, lease_timeout_s=60.0)
    for unit in range(NUM_UNITS):
        samples: list[SizedSample] = [sized(2 * unit + i, NBYTES) for i in range(2)]
        for sample in samples:
            tables.feed(sample, FEEDER, partial(fed_extents, sample.position))
        tables.microbatches.add(plan(samples, index=unit, first=2 * unit, per_microbatch=2, per_batch=2))
    encode(tables, DEAD)
    for _ in range(NUM_UNITS - 1):
        encode(tables, SURVIVOR)
    return tables


def positions_of(extents: tuple[Extent, ...]) -> list[int]:
    return sorted(SPACE.translate(found.gva).offset // 1024 for found in extents)


def test_the_farthest_batch_is_evicted_whole_and_produced_again_in_line(tables: Tables) -> None:
    tables.parts.owner_lost(DEAD, for_good=True)
    assert tables.parts.leases.grant(SURVIVOR, VISION, NBYTES) is None
    assert make_room(tables.parts, SURVIVOR, VISION, NBYTES)
    assert positions_of(tables.parts.holdings.take_released(SURVIVOR)) == [6, 7]
    assert tables.occupancy()[Tier.DRAM] == 8 * (80 + sum(IMAGES)) + 4 * NBYTES
    assert not tables.is_ready(3, 0, 0) and tables.is_ready(1, 0, 0)
    assert encode(tables, SURVIVOR).batch.positions == (0, 1)
    assert encode(tables, SURVIVOR).batch.positions == (6, 7)
    assert tables.parts.num_produced == 8, "a position that is produced again counts once"


def test_eviction_ends_when_there_is_room(tables: Tables) -> None:
    tables.parts.owner_lost(DEAD, for_good=True)
    assert make_room(tables.parts, SURVIVOR, VISION, 0)
    assert positions_of(tables.parts.holdings.take_released(SURVIVOR)) == [6, 7]
    assert not make_room(tables.parts, SURVIVOR, VISION, 2 * NBYTES), "there is room"


def test_nothing_is_evicted_while_a_process_comes_back_or_still_encodes(tables: Tables) -> None:
    tables.parts.owner_lost(DEAD)
    assert not make_room(tables.parts, SURVIVOR, VISION, 0), "its successor has room"
    lease = tables.parts.leases.grant(5, VISION, 1 << 20)
    assert lease is not None
    tables.parts.owner_lost(DEAD, for_good=True)
    tables.parts.owner_lost(6, for_good=True)
    assert not make_room(tables.parts, SURVIVOR, VISION, 0), "nothing waits for room"
    for ready in report(5, lease):
        tables.parts.ready(5, ready)
    tables.parts.owner_lost(SURVIVOR)
    other = tables.parts.leases.grant(5, VISION, 1 << 20)
    assert other is not None and not make_room(tables.parts, 5, VISION, 0), "who encodes will report"


def test_parts_that_a_rank_has_located_and_earlier_parts_stay(tables: Tables) -> None:
    for unit in (1, 3):
        assert tables.locate(unit, 0, 0) is not None
    tables.parts.owner_lost(DEAD, for_good=True)
    assert make_room(tables.parts, SURVIVOR, VISION, 0)
    assert positions_of(tables.parts.holdings.take_released(SURVIVOR)) == [4, 5]
    assert encode(tables, SURVIVOR).batch.positions == (0, 1)
    assert not make_room(tables.parts, SURVIVOR, VISION, 0), "unit 2 waits, and only unit 3 is later, which is read"


def test_a_report_of_an_evicted_part_is_stale(tables: Tables) -> None:
    tables.parts.owner_lost(DEAD, for_good=True)
    make_room(tables.parts, SURVIVOR, VISION, 0)
    late = PartReady(6, VISION, 4, (extent(SURVIVOR, 6, NBYTES),))
    with pytest.raises(StaleLeaseError, match="it is pending"):
        tables.parts.ready(SURVIVOR, late)
