"""Step plans: nothing lost, nothing twice, nothing over capacity, equal counts, batches in the order of need."""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.errors import ConfigError
from flowtrain.scheduler.cost import eq3
from flowtrain.scheduler.encode_batches import make_encode_batches
from flowtrain.scheduler.step_planner import StepPlanner
from flowtrain.scheduler.summary import imbalance, packing_fill
from flowtrain.types.plan import StepPlan, Unit, UnitKind
from flowtrain.types.samples import EVAL_POSITION_BASE, PartSize, SampleRef, SizedSample

CAPACITY = 64
ALIGNMENT = 256


def make_sample(position: int, num_tokens: int, patches: int = 0, encoder: str = "vit") -> SizedSample:
    parts = [PartSize("text", 1, 0, num_tokens, 8 * num_tokens)]
    if patches:
        parts.append(PartSize(encoder, 1, patches, patches, 40 * patches))
    return SizedSample(SampleRef(position, 0, position, 0), num_tokens, patches, num_tokens // 2, tuple(parts))


def make_unit(num_positions: int, first_position: int = 0) -> Unit:
    return Unit(3, UnitKind.TRAIN, 4, first_position, num_positions)


METHODS = [("best_fit_balanced", "lpt"), ("best_fit", "zigzag"), ("isf", "round_robin"), ("random", "lpt")]


def make_planner(
    dp_size: int = 2,
    num_buckets: int = 4,
    max_patches: int = 50,
    capacity: int = CAPACITY,
    packing: str = "best_fit",
    dispatch: str = "zigzag",
) -> StepPlanner:
    limits = {"vit": max_patches}
    return StepPlanner(dp_size, capacity, packing, eq3(capacity), num_buckets, dispatch, limits, ALIGNMENT)


sample_lists = st.lists(
    st.tuples(st.integers(1, CAPACITY), st.integers(0, 60)).map(lambda pair: (pair[0], min(pair))), max_size=30
).map(lambda pairs: [make_sample(position, *pair) for position, pair in enumerate(pairs)])


def positions_in_order(plan: StepPlan) -> list[int]:
    return [sample.position for slot in plan.slots for microbatch in slot for sample in microbatch.samples]


@pytest.mark.parametrize(("packing", "dispatch"), METHODS)
@settings(deadline=None)
@given(samples=sample_lists, dp_size=st.integers(1, 4), num_buckets=st.integers(1, 4))
def test_plan_invariants(
    packing: str, dispatch: str, samples: list[SizedSample], dp_size: int, num_buckets: int
) -> None:
    planner = make_planner(dp_size, num_buckets, packing=packing, dispatch=dispatch)
    plan = planner.plan(make_unit(30), samples)
    assert sorted(positions_in_order(plan)) == [sample.position for sample in samples]
    assert all(len(slot) == dp_size for slot in plan.slots) and plan.slots
    for number, slot in enumerate(plan.slots):
        for rank, microbatch in enumerate(slot):
            assert (microbatch.slot, microbatch.dp_rank) == (number, rank)
            assert microbatch.num_tokens <= CAPACITY
            assert (microbatch.cost > 0) == bool(microbatch.samples)
    num_empty = sum(not microbatch.samples for slot in plan.slots for microbatch in slot)
    assert num_empty == max(0, plan.num_microbatches - len(samples)) and num_empty <= max(dp_size - bool(samples), 0)
    assert plan.num_samples == len(samples)
    assert plan.num_tokens == sum(sample.num_tokens for sample in samples)
    assert plan.num_vision_tokens == sum(sample.num_vision_tokens for sample in samples)
    assert plan.num_target_tokens == sum(sample.num_target_tokens for sample in samples)
    assert 0.0 <= packing_fill(plan) <= 1.0 and imbalance(plan) >= 0.0


@pytest.mark.parametrize(("packing", "dispatch"), METHODS)
@settings(deadline=None)
@given(samples=sample_lists, rng=st.randoms())
def test_plan_does_not_depend_on_the_order_of_sizing(
    packing: str, dispatch: str, samples: list[SizedSample], rng: random.Random
) -> None:
    planner = make_planner(packing=packing, dispatch=dispatch)
    plan = planner.plan(make_unit(30), rng.sample(samples, len(samples)))
    again = make_planner(packing=packing, dispatch=dispatch).plan(make_unit(30), planner.sizes_of(samples))
    assert plan == again and plan.digest() == again.digest()


def test_a_digest_tells_plans_apart() -> None:
    samples = [make_sample(position, 9 + position) for position in range(8)]
    plan = make_planner().plan(make_unit(8), samples)
    assert plan.digest() == "f8aed72fc542585c"  # the same in every process and release
    assert plan.digest() != make_planner(dp_size=4).plan(make_unit(8), samples).digest()


def test_evaluations_before_a_step_do_not_change_its_digest() -> None:
    samples = [make_sample(position, 9 + position, patches=4) for position in range(8)]
    unit = make_unit(8)
    plan, later = (make_planner().plan(replace(unit, index=index), samples) for index in (unit.index, unit.index + 2))
    assert plan.encode_batches and plan.digest() == later.digest()
    assert plan.digest() != make_planner().plan(replace(unit, step=unit.step + 1), samples).digest()
    rounds = [make_planner().plan(replace(unit, kind=UnitKind.EVAL, index=index), samples) for index in (5, 6)]
    assert rounds[0].digest() != rounds[1].digest(), "of one set, after one step"


def test_a_replica_gets_only_its_own_lists() -> None:
    plan = make_planner().plan(make_unit(8), [make_sample(position, 9 + position) for position in range(8)])
    lists = tuple(((f"F s0 m{rank}", f"B s0 m{rank}"),) for rank in range(2))
    carrying = replace(plan, schedules=lists)
    assert carrying.for_replica(1).schedules == ((), lists[1])
    assert replace(carrying.for_replica(0), schedules=()) == plan == plan.for_replica(0)
    assert len({each.digest() for each in (plan, carrying, carrying.for_replica(0), carrying.for_replica(1))}) == 4


def test_replicas_compute_in_one_order_of_stages() -> None:
    """Their microbatches may differ: collectives belong to stages."""
    plan = make_planner().plan(make_unit(8), [make_sample(position, 9 + position) for position in range(8)])
    alternating, apart = ("F s0 m0", "B s0 m0", "F s0 m1", "B s0 m1"), ("F s0 m0", "F s0 m1", "B s0 m1", "B s0 m0")
    replace(plan, schedules=((alternating,), (("F s0 m1 keep", "B s0 m1 keep", "F s0 m0", "B s0 m0"),)))
    with pytest.raises(AssertionError, match="replicas 0 and 1 run stages in another order"):
        replace(plan, schedules=((alternating,), (apart,)))


@settings(deadline=None)
@given(sample_lists)
def test_a_plan_is_its_slots(samples: list[SizedSample]) -> None:
    plan = make_planner().plan(make_unit(30), samples)
    assert StepPlan.of_slots(plan.unit, CAPACITY, plan.slots, plan.encode_batches) == plan
    for slot in range(plan.num_slots):
        for rank in range(plan.dp_size):
            microbatch = plan.slots[slot][rank]
            assert plan.microbatch(slot, rank) == microbatch
            assert plan.microbatch_positions(slot, rank) == tuple(s.position for s in microbatch.samples)


@settings(deadline=None)
@given(sample_lists, st.integers(1, 70), st.integers(1, 4))
def test_encode_batches_follow_the_slots(samples: list[SizedSample], max_patches: int, dp_size: int) -> None:
    plan = make_planner(dp_size, max_patches=max_patches).plan(make_unit(30), samples)
    by_position = {sample.position: sample for sample in samples}
    encoded = [position for batch in plan.encode_batches for position in batch.positions]
    assert encoded == [p for p in positions_in_order(plan) if by_position[p].num_vision_tokens]
    for index, batch in enumerate(plan.encode_batches):
        parts = [by_position[position].parts[1] for position in batch.positions]
        assert (batch.unit, batch.index, batch.encoder) == (3, index, "vit")
        assert batch.num_patches == sum(part.num_patches for part in parts)
        assert batch.num_patches <= max_patches or len(parts) == 1
        assert batch.nbytes == sum(-(-part.nbytes // ALIGNMENT) * ALIGNMENT for part in parts)
        if index:  # greedy: the batch before could not have taken this one's first part
            assert plan.encode_batches[index - 1].num_patches + parts[0].num_patches > max_patches


@pytest.mark.parametrize("num_buckets", [1, 3])
def test_slots_stay_with_their_bucket_and_follow_positions_inside(num_buckets: int) -> None:
    rng = random.Random(1)
    samples = [make_sample(position, rng.choice([60, 61, 30, 31, 8])) for position in range(60)]
    plan = make_planner(dp_size=2, num_buckets=num_buckets).plan(make_unit(60), samples)
    costs = [microbatch.cost for slot in plan.slots for microbatch in slot]
    width = (max(costs) - min(costs)) / num_buckets
    last = [max(sample.position for microbatch in slot for sample in microbatch.samples) for slot in plan.slots]
    bucket = [
        min(int((max(costs) - max(microbatch.cost for microbatch in slot)) / width), num_buckets - 1)
        for slot in plan.slots
    ]
    changes = sum(a != b for a, b in itertools.pairwise(bucket))
    assert changes == len(set(bucket)) - 1, "a bucket's slots are not side by side"
    assert all(a < b for a, b, i, j in zip(last, last[1:], bucket, bucket[1:], strict=False) if i == j)


def test_a_unit_without_samples_runs_one_weightless_slot() -> None:
    plan = make_planner(dp_size=3).plan(make_unit(4), [])
    assert len(plan.slots) == 1 and all(microbatch.samples == () for microbatch in plan.slots[0])
    assert (plan.num_samples, plan.encode_batches, imbalance(plan), packing_fill(plan)) == (0, (), 0.0, 0.0)


def test_fewer_samples_than_ranks_leave_the_rest_weightless() -> None:
    plan = make_planner(dp_size=4).plan(make_unit(4), [make_sample(1, 5), make_sample(2, 6)])
    assert sorted(len(microbatch.samples) for microbatch in plan.slots[0]) == [0, 0, 1, 1]


def test_evaluation_positions_are_planned_alike() -> None:
    unit = Unit(7, UnitKind.EVAL, 4, EVAL_POSITION_BASE, 3)
    plan = make_planner().plan(unit, [make_sample(EVAL_POSITION_BASE + i, 9) for i in range(3)])
    assert plan.unit == unit and plan.num_samples == 3


@pytest.mark.parametrize("num_tokens", [0, CAPACITY + 1])
def test_a_sample_that_fits_no_microbatch_is_named(num_tokens: int) -> None:
    with pytest.raises(ConfigError, match=rf"position 5 has {num_tokens} tokens .*microbatch_tokens \({CAPACITY}\)"):
        make_planner().plan(make_unit(9), [make_sample(5, num_tokens)])


@pytest.mark.parametrize("positions", [(2, 2), (2, 9)])
def test_a_position_twice_or_of_another_unit_is_a_fault(positions: tuple[int, int]) -> None:
    with pytest.raises(AssertionError):
        make_planner().plan(make_unit(9), [make_sample(position, 5) for position in positions])


def test_zigzag_balances_better_than_round_robin_on_seeded_mixes() -> None:
    rng = random.Random(0)
    ours, round_robin = [], []
    for _ in range(12):
        lengths = [min(8192, 8 + int(rng.lognormvariate(6.5, 0.9))) for _ in range(384)]
        samples = [make_sample(position, length) for position, length in enumerate(lengths)]
        plan = make_planner(dp_size=4, capacity=8192).plan(make_unit(384), samples)
        costs = sorted((m.cost for slot in plan.slots for m in slot), key=lambda _: rng.random())
        dealt = [sum(costs[rank :: plan.dp_size]) for rank in range(plan.dp_size)]
        ours.append(imbalance(plan))
        round_robin.append(max(dealt) * len(dealt) / sum(dealt) - 1.0)
        assert packing_fill(plan) > 0.8
    assert max(ours) < 0.1
    assert sum(ours) < 0.7 * sum(round_robin), (ours, round_robin)


def test_batches_of_several_encoders_come_in_the_order_of_need() -> None:
    both = SizedSample(SampleRef(2, 0, 2, 0), 9, 4, 2, (PartSize("a", 1, 2, 2, 10), PartSize("b", 2, 2, 2, 300)))
    samples = [make_sample(1, 9, 3, encoder="b"), both, make_sample(0, 9, 7, encoder="a")]
    batches = make_encode_batches(5, samples, {"a": 8, "b": 5}, ALIGNMENT)
    assert [(batch.index, batch.encoder, batch.positions) for batch in batches] == [
        (0, "b", (1, 2)),
        (1, "a", (2,)),
        (2, "a", (0,)),
    ]
    assert [batch.nbytes for batch in batches] == [256 + 512, 256, 512]


def test_a_part_of_an_unknown_encoder_is_named() -> None:
    with pytest.raises(ConfigError, match=r"position 0 .*'audio'.*encoders \(vit\)"):
        make_planner().plan(make_unit(1), [make_sample(0, 9, 3, encoder="audio")])


@pytest.mark.parametrize("key", ["packing", "dispatch"])
def test_an_unknown_method_fails_when_the_planner_is_made(key: str) -> None:
    with pytest.raises(ConfigError, match=f"scheduler.{key}"):
        make_planner(**{key: "nothing"})


def test_warming_up_leaves_no_trace() -> None:
    samples = [make_sample(position, 9 + position, 3) for position in range(30)]
    warm, cold = make_planner(packing="best_fit_balanced"), make_planner(packing="best_fit_balanced")
    warm.warm_up()
    assert warm.plan(make_unit(30), samples) == cold.plan(make_unit(30), samples)
