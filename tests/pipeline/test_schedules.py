"""1F1B, plain and interleaved: legal at every size, within their memory, and with the stated bubble."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.errors import ScheduleError
from flowtrain.pipeline.actions import Action, ActionKind, MemoryStrategy
from flowtrain.pipeline.dataflow import trace_dataflow
from flowtrain.pipeline.schedules.build import build_schedule
from flowtrain.pipeline.schedules.one_f_one_b import forward_only, in_flight_by_chunk, one_f_one_b
from flowtrain.pipeline.transfers import insert_transfers, run_orders
from flowtrain.pipeline.validate import validate
from tests.pipeline.partitions import even, with_encoder
from tests.pipeline.random_schedules import random_schedule, stage_ranks

STEP = {ActionKind.FORWARD_STAGE: 1, ActionKind.BACKWARD_STAGE: -1}


def short(actions: Sequence[Action]) -> str:
    return " ".join(f"{action.kind}{action.microbatch}" for action in actions if action.kind.is_compute)


def with_chunks(actions: Sequence[Action]) -> str:
    return " ".join(f"{a.kind}{a.segment}.{a.microbatch}" for a in actions if a.kind.is_compute)


def most_in_flight(actions: Sequence[Action]) -> int:
    in_flight = most = 0
    for action in actions:
        in_flight += STEP.get(action.kind, 0)
        most = max(most, in_flight)
    return most


def makespan(lists: Sequence[Sequence[Action]], num_microbatches: int, chunks_per_rank: int) -> float:
    """Time from first to last action, a chunk's forward and backward taking 1 and 2 divided by the chunks of a rank."""
    orders = [[action for action in actions if action.kind.is_compute] for actions in lists]
    flow = trace_dataflow(orders, training=True, num_microbatches=num_microbatches)
    spans = run_orders(orders, flow, lambda action: (1.5 - 0.5 * STEP[action.kind]) / chunks_per_rank)
    return max(rank_spans[-1][1] for rank_spans in spans)


def test_one_stage_alternates():
    (actions,) = one_f_one_b(even(1), 3)
    assert all(action.kind.is_compute for action in actions)
    assert short(actions) == "F0 B0 F1 B1 F2 B2"


def test_three_stages_warm_up_and_drain():
    assert [short(actions) for actions in one_f_one_b(even(3), 4)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_a_rank_with_neighbours_on_both_sides_overlaps_its_transfers():
    lines = [str(action) for action in one_f_one_b(even(3), 4)[1]]
    start = lines.index("B s1 m0 keep")
    assert lines[start : start + 9] == [
        "B s1 m0 keep",
        "isend s1 m0 gradient ->0",
        "wait_irecv s1 m2 activation <-0",
        "F s1 m2 keep",
        "wait_isend s1 m1 activation ->2",
        "isend s1 m2 activation ->2",
        "irecv s1 m1 gradient <-2",
        "wait_irecv s1 m1 gradient <-2",
        "irecv s1 m3 activation <-0",  # while the backward runs
    ]


def test_interleaved_as_megatron_orders_it():
    assert [with_chunks(actions) for actions in one_f_one_b(even(2, 2), 4)] == [
        "F0.0 F0.1 F1.0 F1.1 F0.2 B1.0 F0.3 B1.1 F1.2 B0.0 F1.3 B0.1 B1.2 B1.3 B0.2 B0.3",
        "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 F0.2 B0.0 F0.3 B0.1 F1.2 B1.2 F1.3 B1.3 B0.2 B0.3",
    ]


def test_a_remainder_is_spread_over_the_groups():
    (first, _) = forward_only(even(2, 2), 5)
    assert with_chunks(first) == "F0.0 F0.1 F0.2 F1.0 F1.1 F1.2 F0.3 F0.4 F1.3 F1.4"


@pytest.mark.parametrize("pp_size", range(1, 7))
@pytest.mark.parametrize("chunks_per_rank", range(1, 5))
@pytest.mark.parametrize("training", [True, False])
def test_every_size_is_valid(pp_size, chunks_per_rank, training):
    for num_microbatches in range(18):
        lists = build_schedule(
            "interleaved_1f1b",
            even(pp_size, chunks_per_rank),
            num_microbatches=num_microbatches,
            training=training,
            memory=MemoryStrategy.SELECTIVE,
        )
        limits = [
            sum(in_flight_by_chunk(even(pp_size, chunks_per_rank), rank, num_microbatches)) for rank in range(pp_size)
        ]
        validate(lists, training=training, num_microbatches=num_microbatches, held=lambda _: 1, limits=limits)
        for rank, actions in enumerate(lists):
            stages = {action.segment: action.stage for action in actions}
            assert stages == {c: c * pp_size + rank for c in range(chunks_per_rank) if num_microbatches}


@pytest.mark.parametrize("pp_size", range(1, 7))
@pytest.mark.parametrize("num_microbatches", range(12))
def test_1f1b_holds_no_more_than_the_depth_asks(pp_size, num_microbatches):
    lists = one_f_one_b(even(pp_size), num_microbatches)
    assert [most_in_flight(actions) for actions in lists] == [
        min(pp_size - rank, num_microbatches) for rank in range(pp_size)
    ]


@given(st.integers(1, 8), st.integers(0, 40), st.integers(1, 4))
def test_what_a_chunk_keeps_is_what_its_list_keeps(pp_size: int, num_microbatches: int, chunks: int) -> None:
    for rank, actions in enumerate(one_f_one_b(even(pp_size, chunks), num_microbatches)):
        first: Counter[int] = Counter()
        for action in actions:
            if action.kind is ActionKind.BACKWARD_STAGE:
                break
            first[action.segment] += action.kind is ActionKind.FORWARD_STAGE
        kept = in_flight_by_chunk(even(pp_size, chunks), rank, num_microbatches)
        assert kept == [first[chunk] for chunk in range(chunks)]
        assert most_in_flight(actions) == sum(kept)


@given(st.integers(2, 6), st.integers(2, 4), st.integers(0, 40))
def test_interleaving_divides_the_bubble_for_any_number_of_microbatches(pp_size, chunks_per_rank, beyond):
    num_microbatches = pp_size + beyond
    computing = 3 * num_microbatches
    plain = makespan(one_f_one_b(even(pp_size), num_microbatches), num_microbatches, 1) - computing
    lists = one_f_one_b(even(pp_size, chunks_per_rank), num_microbatches)
    bubble = makespan(lists, num_microbatches, chunks_per_rank) - computing
    assert plain == pytest.approx(3 * (pp_size - 1))
    assert bubble == pytest.approx(3 * (pp_size - 1) / chunks_per_rank)


@given(st.randoms(use_true_random=False), st.integers(1, 4), st.integers(1, 3), st.integers(0, 5))
def test_any_order_that_can_run_becomes_valid_lists(random, pp_size, chunks_per_rank, num_microbatches):
    ranks = stage_ranks(pp_size, chunks_per_rank, random)
    parts = [random.randint(1, 3) for _ in range(num_microbatches)]
    training = random.random() < 0.8
    lists = random_schedule(random, ranks, parts, join_stage=random.randint(0, len(ranks)), training=training)
    validate(lists, training=training, num_microbatches=num_microbatches)


def test_orders_that_wait_in_a_circle_are_refused():
    lists = [[action for action in actions if action.kind.is_compute] for actions in one_f_one_b(even(2), 2)]
    lists[1] = [lists[1][0], lists[1][2], lists[1][3], lists[1][1]]  # F0 F1 B1 B0
    insert_transfers(lists, training=True, num_microbatches=2)
    lists[0] = [lists[0][0], lists[0][2], lists[0][1], lists[0][3]]  # F0 B0 F1 B1
    with pytest.raises(ScheduleError, match="circle"):
        insert_transfers(lists, training=True, num_microbatches=2)


def test_random_schedules_differ_from_each_other():
    """Without this, the tests above would prove nothing."""
    seen = {random_schedule(Random(seed), stage_ranks(2, 2), [1, 2, 1], join_stage=2) for seed in range(8)}
    assert len(seen) == 8


def test_a_negative_number_of_microbatches_is_refused():
    for build in (one_f_one_b, forward_only):
        with pytest.raises(ValueError, match=r"num_microbatches \(-1\)"):
            build(even(2), -1)


def test_plain_1f1b_has_one_backbone_stage_per_rank():
    with pytest.raises(ValueError, match=r"one backbone stage per rank, not 2; use interleaved_1f1b"):
        build_schedule("1f1b", even(2, 2), num_microbatches=1, training=True)
    assert build_schedule("1f1b", with_encoder(2, "own"), num_microbatches=1, training=True)
