from __future__ import annotations

import dataclasses
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.errors import AddressError, ConfigError, PoolError, StaleLeaseError
from flowtrain.flow.capacity import check_capacity, check_scattered_capacity
from flowtrain.mempool.gva import AddressSpace
from flowtrain.types.memory import Extent, Tier
from flowtrain.types.messages import Lease, PartReady, Remake
from flowtrain.types.plan import StepPlan, UnitKind
from flowtrain.types.samples import EVAL_POSITION_BASE, IMAGES_PART, TEXT_PART, SizedSample
from tests.flow.building import IMAGES, VISION, Tables, aligned, plan, ref, rejection, sized

SPACE = AddressSpace(num_processes=32, segment_nbytes=1 << 20)
FEEDER, ENCODER, OTHER = 0, 1, 2
PLENTY = 1 << 20
FED_IMAGES = sum(IMAGES)


class Setup:
    """A parts table with a clock that the test moves, and owners that put each part at a new address."""

    def __init__(self, keeps_batches: bool = True) -> None:
        self.now = 100.0
        self.tables = Tables(SPACE, lease_timeout_s=60.0, clock=lambda: self.now, keeps_batches=keeps_batches)
        for owner in (FEEDER, 5, 6, 7):
            self.tables.parts.leases.add_feeder(owner, 0)
        self._offsets: dict[int, int] = {}

    def extents(self, owner: int, nbytes: int) -> tuple[Extent, ...]:
        offset = self._offsets.get(owner, 0)
        self._offsets[owner] = offset + 4096
        return (Extent(SPACE.gva(Tier.DRAM, owner, offset), nbytes),)

    def feed(self, *samples: SizedSample, owner: int = FEEDER) -> None:
        for sample in samples:
            self.tables.feed(sample, owner, partial(self.extents, owner))

    def remake(self, owner: int = 5) -> list[PartReady]:
        """Produce all lost parts again."""
        made = []
        for lost in self.tables.parts.leases.grant_lost_parts(owner):
            for part in lost.parts:
                nbytes = FED_IMAGES if part == IMAGES_PART else 80
                made.append(PartReady(lost.ref.position, part, 0, self.extents(owner, nbytes)))
                self.tables.parts.remade(owner, made[-1])
        return made

    def feed_and_plan(self, *samples: SizedSample, **how: int) -> StepPlan:
        self.feed(*samples)
        made = plan(samples, first=samples[0].position, **how)  # type: ignore[arg-type]
        self.tables.microbatches.add(made)
        return made

    def lease(self, owner: int = ENCODER, free_nbytes: int = PLENTY) -> Lease:
        lease = self.tables.parts.leases.grant(owner, VISION, free_nbytes)
        assert lease is not None
        return lease

    def report(self, owner: int, lease: Lease, *positions: int, nbytes: int = 100) -> tuple[Extent, ...]:
        extents: tuple[Extent, ...] = ()
        for position in positions or lease.needed:
            extents = self.extents(owner, nbytes)
            self.tables.parts.ready(owner, PartReady(position, VISION, lease.epoch, extents))
        return extents


@pytest.fixture
def setup() -> Setup:
    return Setup()


def test_the_life_of_a_position(setup: Setup) -> None:
    d = setup.tables
    setup.feed_and_plan(sized(0, 100), sized(1))
    assert d.ready_slots(0, 0) == (1,)  # text alone waits for no encoder
    assert d.locate(0, 0, 0) is None

    lease = setup.lease()
    assert (lease.needed, lease.refs, lease.nbytes) == ((0,), (ref(0),), 128)
    vision = setup.report(ENCODER, lease)
    assert d.is_ready(0, 0, 0) and d.ready_slots(0, 0) == (0, 1)
    location = d.locate(0, 0, 0)
    assert location is not None and [part.part for part in location.parts] == [TEXT_PART, VISION]
    assert location.parts[1].extents == vision and location.rejected == ()
    assert d.occupancy() == {Tier.HBM: 0, Tier.DRAM: 100 + 80 + 80 + FED_IMAGES}

    d.release(0, 0, 0)
    assert d.parts.holdings.take_released(ENCODER) == vision and d.parts.holdings.take_released(ENCODER) == ()
    d.locate(0, 1, 0)
    d.release(0, 1, 0)
    rows = d.consume(0)
    assert [dataclasses.astuple(row) for row in rows] == [
        (0, 1, 0, 2, 1, 0, 0, "consumed"),
        (1, 1, 10, 2, 1, 0, 1, "consumed"),
    ]
    assert d.parts.num_produced == 2
    assert d.occupancy()[Tier.DRAM] == 0 and len(d.parts.holdings.take_released(FEEDER)) == 3


def test_leases_follow_unit_and_batch_order_and_never_skip(setup: Setup) -> None:
    setup.feed_and_plan(sized(0, 900), sized(1, 100))
    setup.feed_and_plan(sized(2, 100), index=1)
    assert setup.tables.parts.leases.grant(ENCODER, VISION, 500) is None, "the small batches after it must wait"
    order = [setup.lease().batch for _ in range(3)]
    assert [(batch.unit, batch.index) for batch in order] == [(0, 0), (0, 1), (1, 0)]
    assert setup.tables.parts.leases.grant(ENCODER, VISION, PLENTY) is None


def test_a_lost_owners_parts_are_first_in_line_and_its_messages_refused(setup: Setup) -> None:
    d = setup.tables
    setup.feed_and_plan(sized(0, 100), sized(1, 100), sized(2, 100), sized(3, 100), per_batch=2)
    first = setup.lease(ENCODER)
    kept = setup.report(ENCODER, first, 0)
    d.parts.owner_lost(ENCODER)
    d.parts.owner_lost(ENCODER)
    assert not d.is_ready(0, 0, 0) and d.occupancy()[Tier.DRAM] == 4 * (80 + FED_IMAGES)
    with pytest.raises(StaleLeaseError, match="counts as lost"):
        setup.report(ENCODER, first, 1)
    assert d.parts.leases.grant(ENCODER, VISION, PLENTY) is None and d.parts.leases.grant_lost_parts(ENCODER) == ()

    again = setup.lease(OTHER)
    assert (again.batch, again.needed, again.epoch > first.epoch) == (first.batch, (0, 1), True)
    assert setup.report(OTHER, again) != kept
    assert setup.lease(OTHER).needed == (2, 3)


def test_only_lost_parts_of_a_batch_are_needed_but_all_refs_come_along(setup: Setup) -> None:
    setup.feed_and_plan(sized(0, 100), sized(1, 100), per_batch=2)
    setup.now = 0
    first = setup.lease(ENCODER)
    setup.report(ENCODER, first, 0)
    assert setup.tables.locate(0, 0, 0) is not None, "a rank reads it"
    setup.now = 61
    assert setup.tables.parts.expire_leases() == (first,)
    again = setup.lease(OTHER, free_nbytes=128)
    assert (again.needed, again.refs, again.nbytes) == ((1,), (ref(0), ref(1)), 128)
    with pytest.raises(StaleLeaseError, match="leased to process 2"):
        setup.report(ENCODER, first, 1)


@given(reported=st.integers(0, 3), located=st.booleans(), sizes=st.lists(st.integers(1, 640), min_size=4, max_size=4))
def test_an_expired_lease_does_not_split_its_batch(reported: int, located: bool, sizes: list[int]) -> None:
    """Otherwise two segments of one largest batch each could have no room for a step's second batch."""
    setup = Setup()
    samples = [sized(position, nbytes) for position, nbytes in enumerate(sizes * 2)]
    setup.feed_and_plan(*samples, per_batch=4, per_microbatch=2 if located else 8)
    room = {owner: sum(map(aligned, sizes)) for owner in (ENCODER, OTHER)}  # each holds one batch, both the step
    first = setup.lease(ENCODER, room[ENCODER])
    for position in first.needed[:reported]:
        setup.report(ENCODER, first, position, nbytes=sizes[position])
    is_read = located and reported >= 2
    assert (setup.tables.locate(0, 0, 0) is not None) == is_read
    setup.now += 61
    assert setup.tables.parts.expire_leases() == (first,)
    assert len(setup.tables.parts.holdings.take_released(ENCODER)) == (reported - 2 if is_read else reported)
    if is_read:
        setup.tables.release(0, 0, 0)
    for owner in (OTHER, ENCODER):
        lease = setup.lease(owner, room[owner])
        for position in lease.needed:
            setup.report(owner, lease, position, nbytes=sizes[position % 4])
    assert setup.tables.parts.num_produced == 8


def test_an_expired_lease_that_was_taken_again_by_the_same_owner_has_a_new_epoch(setup: Setup) -> None:
    setup.feed_and_plan(sized(0, 100))
    first = setup.lease()
    setup.now += 59
    assert setup.tables.parts.expire_leases() == ()
    setup.now += 2
    assert setup.tables.parts.expire_leases() == (first,)
    with pytest.raises(StaleLeaseError, match="it is pending"):
        setup.report(ENCODER, first)
    second = setup.lease()
    with pytest.raises(StaleLeaseError, match=f"leased under epoch {second.epoch} now"):
        setup.report(ENCODER, first)
    setup.report(ENCODER, second)
    with pytest.raises(StaleLeaseError, match="it is ready"):
        setup.report(ENCODER, second)


def test_lost_text_is_produced_again(setup: Setup) -> None:
    d = setup.tables
    setup.feed_and_plan(sized(0), sized(1))
    d.locate(0, 0, 0)
    d.release(0, 0, 0)
    d.parts.owner_lost(FEEDER)
    assert not d.is_ready(0, 1, 0)
    lost = (Remake(ref(1), (TEXT_PART,)),)
    assert d.parts.leases.grant_lost_parts(5) == lost and d.parts.leases.grant_lost_parts(5) == (), (
        "released text is not needed any more"
    )
    d.parts.owner_lost(5)
    assert d.parts.leases.grant_lost_parts(6) == lost
    again = PartReady(1, TEXT_PART, 0, setup.extents(6, 80))
    with pytest.raises(StaleLeaseError, match="leased to process 6"):
        d.parts.remade(7, again)
    d.parts.remade(6, again)
    location = d.locate(0, 1, 0)
    assert location is not None and location.parts[0].extents == again.extents


def test_a_rank_that_read_before_the_owner_died_may_release(setup: Setup) -> None:
    d = setup.tables
    setup.feed_and_plan(sized(0, 100))
    setup.report(ENCODER, setup.lease())
    assert d.locate(0, 0, 0) is not None
    d.parts.owner_lost(ENCODER)
    again = setup.lease(OTHER)
    d.release(0, 0, 0)
    with pytest.raises(StaleLeaseError, match="released"):
        setup.report(OTHER, again)
    assert [row.state for row in d.consume(0)] == ["consumed"]
    with pytest.raises(StaleLeaseError, match="is consumed"):
        setup.report(OTHER, again)
    assert d.parts.leases.grant(OTHER, VISION, PLENTY) is None


def test_nothing_waits_for_a_rejected_position(setup: Setup) -> None:
    d = setup.tables
    setup.feed_and_plan(sized(0, 100), sized(1, 100), per_microbatch=2, per_batch=2)
    lease = setup.lease()
    assert d.parts.reject(rejection(0))
    assert not d.parts.reject(rejection(0)), "the same bad image, met again"
    with pytest.raises(StaleLeaseError, match="rejected"):
        setup.report(ENCODER, lease, 0)
    assert len(d.parts.holdings.take_released(FEEDER)) == 1, "its text is freed"
    setup.report(ENCODER, lease, 1)
    location = d.locate(0, 0, 0)
    assert location is not None and location.rejected == (0,)
    assert {part.position for part in location.parts} == {1}
    assert not d.parts.reject(rejection(1)), "a rank trains on it"
    d.release(0, 0, 0)
    assert [(row.state, row.slot) for row in d.consume(0)] == [("rejected", 0), ("consumed", 0)]
    assert not d.parts.reject(rejection(1))


def test_a_batch_whose_positions_are_all_rejected_is_skipped(setup: Setup) -> None:
    setup.feed_and_plan(sized(0, 100), sized(1, 100), sized(2, 100), per_batch=2)
    setup.tables.parts.reject(rejection(0))
    setup.tables.parts.reject(rejection(1))
    assert setup.lease().needed == (2,)
    assert setup.tables.ready_slots(0, 0) == (0, 1)


def test_positions_rejected_before_they_are_sized_count_as_done(setup: Setup) -> None:
    d = setup.tables
    samples = [sized(0), sized(2)]
    setup.feed(*samples)
    d.parts.reject(rejection(1))
    d.microbatches.add(plan(samples, count=3))
    for slot in range(2):
        d.locate(0, slot, 0)
        d.release(0, slot, 0)
    assert [(row.position, row.state, row.slot) for row in d.consume(0)] == [
        (0, "consumed", 0),
        (1, "rejected", -1),
        (2, "consumed", 1),
    ]


def test_a_weightless_microbatch_is_ready_at_once(setup: Setup) -> None:
    setup.feed_and_plan(sized(0, 100), dp_size=2)
    location = setup.tables.locate(0, 0, 1)
    assert location is not None and location.parts == ()
    setup.tables.release(0, 0, 1)
    assert setup.tables.ready_slots(0, 0) == ()


def test_evaluation_positions_are_kept_apart(setup: Setup) -> None:
    d = setup.tables
    for unit, (first, kind) in enumerate(
        [(0, UnitKind.TRAIN), (EVAL_POSITION_BASE, UnitKind.EVAL), (1, UnitKind.TRAIN)]
    ):
        sample = sized(first)
        setup.feed(sample)
        d.microbatches.add(plan([sample], index=unit, first=first, kind=kind))
        d.locate(unit, 0, 0)
        d.release(unit, 0, 0)
        assert len(d.consume(unit)) == 1
    for position in (0, 1, EVAL_POSITION_BASE):
        with pytest.raises(PoolError, match="sized twice"):
            setup.feed(sized(position))


def test_reports_are_checked_against_size_segment_and_parts(setup: Setup) -> None:
    d = setup.tables
    setup.feed_and_plan(sized(7, 100))
    lease = setup.lease()
    with pytest.raises(PoolError, match="position 7: its vision was sized as 100 bytes, process 1 put 99"):
        setup.report(ENCODER, lease, nbytes=99)
    with pytest.raises(PoolError, match="belongs to process 2"):
        d.parts.ready(ENCODER, PartReady(7, VISION, lease.epoch, setup.extents(OTHER, 100)))
    with pytest.raises(AddressError, match="outside the pool"):
        d.parts.ready(ENCODER, PartReady(7, VISION, lease.epoch, (Extent(5, 100),)))
    with pytest.raises(PoolError, match="no part 'audio'; it has text, vision"):
        d.parts.ready(ENCODER, PartReady(7, "audio", lease.epoch, setup.extents(ENCODER, 100)))
    with pytest.raises(PoolError, match="sized as 80 bytes"):
        d.parts.add_sized([sized(8)], FEEDER, [PartReady(8, TEXT_PART, 0, setup.extents(FEEDER, 72))])
    d.parts.owner_lost(FEEDER)
    with pytest.raises(StaleLeaseError, match="counts as lost"):
        setup.feed(sized(9))


def test_a_plan_must_fit_what_was_sized(setup: Setup) -> None:
    d = setup.tables
    samples = [sized(0, 100), sized(1, 100)]
    setup.feed(*samples)
    good = plan(samples)
    short = dataclasses.replace(good.encode_batches[0], nbytes=100)
    for bad, message in [
        (dataclasses.replace(good, encode_batches=good.encode_batches[:1]), "need 2 parts .* have 1"),
        (dataclasses.replace(good, encode_batches=(short, good.encode_batches[1])), "100 bytes; its parts take 128"),
        (plan(samples[:1], count=2), "leaves out its position 1"),
        (plan([*samples, samples[0]]), "planned twice"),
        (plan([*samples, sized(2)]), "position 2 was neither sized nor rejected"),
    ]:
        fresh = Setup()
        fresh.feed(*samples)
        with pytest.raises(PoolError, match=message):
            fresh.tables.microbatches.add(bad)
        assert fresh.tables.parts.leases.first_in_line(VISION) is None, "a plan is taken whole or not at all"
    d.microbatches.add(good)
    with pytest.raises(PoolError, match="unit 0 was planned twice"):
        d.microbatches.add(good)


def test_release_and_consume_refuse_what_is_not_due(setup: Setup) -> None:
    d = setup.tables
    setup.feed_and_plan(sized(0))
    for unit, slot, message in [(0, 0, "does not know where it lies"), (0, 3, "not planned"), (9, 0, "not planned")]:
        with pytest.raises(PoolError, match=message):
            d.release(unit, slot, 0)
    with pytest.raises(PoolError, match="1 of its microbatches are not released"):
        d.consume(0)
    d.locate(0, 0, 0)
    d.release(0, 0, 0)
    with pytest.raises(PoolError, match="has read it before"):
        d.release(0, 0, 0)
    d.consume(0)
    with pytest.raises(PoolError, match="not planned"):
        d.consume(0)


def test_a_wait_is_explained(setup: Setup) -> None:
    d = setup.tables
    assert d.microbatches.describe_wait(0, 0, 0) == "unit 0, slot 0, replica 0 is not planned"
    setup.feed_and_plan(sized(0, 100), sized(1, 100), sized(2, 100), per_microbatch=3)
    lease, second = setup.lease(), setup.lease()
    setup.now += 12.5
    d.parts.owner_lost(FEEDER)
    setup.report(ENCODER, second, nbytes=100)
    text = d.microbatches.describe_wait(0, 0, 0)
    assert "waits for 5 parts" in text
    assert f"vision of position 0 (100 bytes) is leased to process 1 for 12.5 s (lease {lease.lease_id})" in text
    assert "text of position 1 (80 bytes) is pending: lost with its owner" in text
    why = "images of 1 positions of batch 2 of unit 0 were lost with their feeder"
    assert f"vision of position 2 (100 bytes) is pending in encode batch 2 of unit 0: {why}" in text
    setup.remake()
    text = d.microbatches.describe_wait(0, 0, 0)
    assert "waits for 2 parts" in text and "in encode batch 2 of unit 0: no encoder has room or asks" in text


def test_many_waiting_parts_are_cut_short(setup: Setup) -> None:
    samples = [sized(position, 100) for position in range(12)]
    setup.feed_and_plan(*samples, per_microbatch=12)
    text = setup.tables.microbatches.describe_wait(0, 0, 0)
    assert "waits for 12 parts" in text and text.endswith("and 4 more")


def test_batches_may_stand_in_line_before_any_plan_and_outlive_a_unit(setup: Setup) -> None:
    """As in ``arrival`` order: a unit takes the second and third position of two batches of two."""
    d = setup.tables
    samples = [sized(position, 100) for position in range(4)]
    setup.feed(*samples)
    group = plan(samples, per_batch=2)
    d.parts.add_batches(group.encode_batches)
    assert not d.parts.is_done(0)
    leases = [setup.lease() for _ in range(2)]
    for lease in leases:
        setup.report(ENCODER, lease)
    assert d.parts.is_done(0) and not d.parts.is_rejected(0)
    d.parts.reject(rejection(3))
    assert d.parts.is_done(3) and d.parts.is_rejected(3)

    made = dataclasses.replace(plan(samples[1:3], count=4), encode_batches=())
    d.microbatches.add(dataclasses.replace(made, unit=dataclasses.replace(made.unit, num_positions=2, chosen=(1, 2))))
    for slot in range(2):
        d.locate(0, slot, 0)
        d.release(0, slot, 0)
    assert [row.position for row in d.consume(0)] == [1, 2]
    assert (d.parts.consumed.frontier, d.parts.consumed.ahead) == (0, (1, 2))
    assert d.parts.is_consumed(2) and not d.parts.is_consumed(0)
    with pytest.raises(PoolError, match="sized twice"):
        setup.feed(sized(1, 100))

    d.parts.owner_lost(ENCODER)
    again = setup.lease(OTHER)
    assert (again.batch.positions, again.needed) == ((0, 1), (0,)), "forwarded whole, as before"
    setup.report(OTHER, again)
    rest = dataclasses.replace(plan([samples[0]], index=1, count=4), encode_batches=())
    d.microbatches.add(dataclasses.replace(rest, unit=dataclasses.replace(rest.unit, num_positions=2, chosen=(0, 3))))
    assert d.describe_positions([0, 3]) == "nothing"
    d.locate(1, 0, 0)
    d.release(1, 0, 0)
    d.consume(1)
    assert (d.parts.consumed.frontier, d.parts.consumed.ahead) == (4, ())
    assert not d.parts.leases._batches, "a batch is forgotten with its last position"


def test_a_plan_without_batches_needs_them_in_line(setup: Setup) -> None:
    samples = [sized(0, 100)]
    setup.feed(*samples)
    with pytest.raises(PoolError, match="need 1 parts from encoders, its encode batches have 0"):
        setup.tables.microbatches.add(dataclasses.replace(plan(samples), encode_batches=()))


def test_nothing_is_remembered_of_consumed_units(setup: Setup) -> None:
    d = setup.tables
    for unit in range(50):
        setup._offsets.clear()
        samples = [sized(unit * 4 + i, 100 * (i % 2)) for i in range(4)]
        setup.feed_and_plan(*samples, index=unit, per_batch=2)
        if unit % 3 == 0:
            d.parts.reject(rejection(unit * 4 + 1))
        if (lease := d.parts.leases.grant(ENCODER, VISION, PLENTY)) is not None:
            setup.report(ENCODER, lease)
        for slot in range(4):
            assert d.locate(unit, slot, 0) is not None
            d.release(unit, slot, 0)
        d.consume(unit)
        d.parts.holdings.take_released(FEEDER)
        d.parts.holdings.take_released(ENCODER)
    assert d.parts.leases.grant(ENCODER, VISION, PLENTY) is None
    for holder in (d.parts, d.parts.leases, d.parts.holdings, d.microbatches):
        for name, value in vars(holder).items():
            if isinstance(value, dict) and name != "_feeders":
                assert sum(len(item) if hasattr(item, "__len__") else 1 for item in value.values()) == 0, name


@pytest.mark.parametrize(
    ("segments", "largest", "parts", "fits"),
    [([100, 100], 50, 4, True), ([100, 100], 51, 2, True), ([100, 100], 51, 3, False), ([49, 50], 50, 2, False)],
)
def test_a_pool_must_hold_a_worst_case_step(segments: list[int], largest: int, parts: int, fits: bool) -> None:
    if fits:
        check_capacity(segments, largest, parts, "encoders.vision.segment_nbytes")
        return
    with pytest.raises(ConfigError, match=rf"up to {parts} parts of up to {largest} bytes.*encoders\.vision") as caught:
        check_capacity(segments, largest, parts, "encoders.vision.segment_nbytes")
    least = int(str(caught.value).split("to at least ")[1].split(",")[0])
    check_capacity([least] * len(segments), largest, parts, "knob")


@given(st.lists(st.integers(20, 60), min_size=1, max_size=4), st.integers(1, 20), st.integers(0, 200))
@settings(deadline=None)
def test_a_lease_fits_however_the_rest_is_scattered(segments: list[int], largest: int, held: int) -> None:
    """In the worst way every segment has one byte less free than the lease takes."""
    enough_to_block = sum(segment - largest + 1 for segment in segments)
    try:
        check_scattered_capacity(segments, largest, held, "encoders.vision.segment_nbytes")
    except ConfigError as error:
        assert held > enough_to_block - len(segments), "it is refused only where it is about to fail"
        least = int(str(error).split("raise encoders.vision.segment_nbytes to at least ")[1].split(",")[0])
        check_scattered_capacity([least] * len(segments), largest, held, "knob")
    else:
        assert held < enough_to_block


def test_a_segment_too_small_for_a_sample_and_a_pool_too_small_for_a_step_have_their_own_errors() -> None:
    with pytest.raises(ConfigError, match=r"no segment can hold one sample: the largest has 49 bytes.*up to 50; raise"):
        check_capacity([49] * 9, 50, 1, "pool.feeder_segment_nbytes")
    with pytest.raises(ConfigError, match="cannot hold one step"):
        check_capacity([50] * 9, 50, 10, "pool.feeder_segment_nbytes")


def test_a_pool_without_segments_holds_nothing() -> None:
    with pytest.raises(ConfigError, match="no segment at all"):
        check_capacity([], 10, 1, "knob")
