"""The executor: the order of its calls, and that every valid list computes the plain gradients, over threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.errors import ScheduleError
from flowtrain.pipeline.actions import Action, ActionKind, MemoryStrategy
from flowtrain.pipeline.executor import checked_schedule, execute
from flowtrain.pipeline.schedules.one_f_one_b import forward_only, one_f_one_b
from tests.pipeline.partitions import even, parse_actions
from tests.pipeline.random_schedules import random_schedule, shuffle_legally, stage_ranks
from tests.pipeline.scalar_pipeline import pipeline_gradients, plain_gradients


@dataclass
class Recorder:
    log: list[str] = field(default_factory=list)

    def next_microbatch(self, k: int) -> str:
        self.log.append(f"ask {k}")
        return "abc"[-k - 1]  # another order than the list's, as with `data.order: arrival`

    def release(self, microbatch: str) -> None:
        self.log.append(f"release {microbatch}")

    def forward_stage(self, action: Action, microbatch: str) -> None:
        self.log.append(f"F{action.microbatch} {microbatch}")

    def backward_stage(self, action: Action, microbatch: str, *, is_last: bool) -> None:
        self.log.append(f"B{action.microbatch} {microbatch}{' last' if is_last else ''}")

    def start_transfers(self, launches: Sequence[tuple[Action, str]]) -> None:
        self.log.append(" + ".join(f"{action.kind}{action.microbatch} {microbatch}" for action, microbatch in launches))

    def wait_transfer(self, action: Action) -> None:
        self.log.append(f"{action.kind}{action.microbatch}")


def log_of(actions: Sequence[Action]) -> list[str]:
    recorder = Recorder()
    execute(actions, recorder, recorder.next_microbatch, recorder.release)
    return recorder.log


def test_training_asks_runs_and_releases_one_by_one():
    assert log_of(one_f_one_b(even(1), 2)[0]) == [
        *("ask 0", "F0 c", "B0 c", "release c"),
        *("ask 1", "F1 b", "B1 b last", "release b"),
    ]


def test_evaluation_releases_after_forward():
    assert log_of(forward_only(even(1), 2)[0]) == ["ask 0", "F0 c", "release c", "ask 1", "F1 b", "release b"]


def test_neighbouring_launches_start_as_one_group_and_a_receive_asks_for_its_microbatch():
    actions = parse_actions("""
        irecv s1 m0 activation <-0
        wait_irecv s1 m0 activation <-0
        F s1 m0 keep
        isend s1 m0 activation ->2
        irecv s1 m1 activation <-0
        wait_irecv s1 m1 activation <-0
        F s1 m1 keep
        wait_isend s1 m0 activation ->2
        isend s1 m1 activation ->2
        wait_isend s1 m1 activation ->2
    """)
    assert log_of(actions) == [
        *("ask 0", "irecv0 c", "wait_irecv0", "F0 c"),
        *("ask 1", "isend0 c + irecv1 b", "wait_irecv1", "F1 b"),
        *("wait_isend0", "release c", "isend1 b", "wait_isend1", "release b"),
    ]


def test_the_last_backward_is_each_stages_own():
    log = log_of(one_f_one_b(even(1, 2), 2)[0])
    assert [entry for entry in log if entry.endswith("last")] == ["B1 b last", "B1 b last"]


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b"])
@pytest.mark.parametrize("pp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_microbatches", [0, 1, 3, 6])
def test_schedules_compute_the_plain_gradients(name, pp_size, num_microbatches):
    chunks = 1 if name == "1f1b" else 3
    lists = checked_schedule(name, even(pp_size, chunks), num_microbatches=num_microbatches, training=True)
    weights = [stage % 3 - 1 or 2 for stage in range(pp_size * chunks)]
    microbatches = [[k + each for each in range(1 + k % 3)] for k in range(num_microbatches)]
    assert pipeline_gradients(lists, weights, microbatches) == plain_gradients(weights, microbatches)


@given(st.randoms(use_true_random=False), st.integers(1, 4), st.integers(1, 3), st.integers(0, 5))
def test_any_legal_order_computes_the_plain_gradients(random, pp_size, chunks_per_rank, num_microbatches):
    """With stages on random ranks, and microbatches cut into parts that join at some stage."""
    ranks = stage_ranks(pp_size, chunks_per_rank, random)
    parts = [random.randint(1, 3) for _ in range(num_microbatches)]
    lists = random_schedule(random, ranks, parts, join_stage=random.randint(0, len(ranks)))
    weights = [random.randint(-3, 3) for _ in ranks]
    microbatches = [[random.randint(-5, 5) for _ in range(random.randint(1, 6))] for _ in parts]
    assert pipeline_gradients(lists, weights, microbatches, parts) == plain_gradients(weights, microbatches)


@given(st.randoms(use_true_random=False), st.integers(1, 4), st.integers(1, 2), st.integers(1, 4))
def test_any_legal_permutation_computes_the_plain_gradients(random, pp_size, chunks_per_rank, num_microbatches):
    lists = one_f_one_b(even(pp_size, chunks_per_rank), num_microbatches)
    lists = shuffle_legally(random, lists, num_microbatches, num_tries=60)
    weights = [random.randint(-3, 3) for _ in range(pp_size * chunks_per_rank)]
    microbatches = [[random.randint(-5, 5) for _ in range(random.randint(1, 6))] for _ in range(num_microbatches)]
    assert pipeline_gradients(lists, weights, microbatches) == plain_gradients(weights, microbatches)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("pp_size", "chunks_per_rank"), [(1, 1), (1, 3), (3, 1), (4, 2)])
def test_schedules_start_microbatches_in_order_on_every_rank(pp_size, chunks_per_rank, training):
    lists = checked_schedule("interleaved_1f1b", even(pp_size, chunks_per_rank), num_microbatches=11, training=training)
    for actions in lists:
        assert list(dict.fromkeys(action.microbatch for action in actions)) == list(range(11))


def test_a_schedule_is_built_and_checked_once(monkeypatch):
    built = []
    monkeypatch.setattr("flowtrain.pipeline.executor.validate", lambda *_, **__: built.append(True))
    for _ in range(2):
        checked_schedule("1f1b", even(5), num_microbatches=11, training=True, memory=MemoryStrategy.SELECTIVE)
    assert len(built) == 1


def test_a_schedule_that_does_not_validate_is_not_given_out(monkeypatch):
    lists = one_f_one_b(even(2), 3)
    monkeypatch.setattr("flowtrain.pipeline.executor.build_schedule", lambda *_, **__: (lists[0], lists[1][:-1]))
    with pytest.raises(ScheduleError, match="has no wait_isend"):
        checked_schedule(
            "1f1b", even(2), num_microbatches=3, training=True, memory=MemoryStrategy.OFFLOAD
        )  # not cached


def test_a_schedule_that_keeps_more_than_was_predicted_is_not_given_out(monkeypatch):
    (actions,) = one_f_one_b(even(1), 3)
    forwards = [action for action in actions if action.kind is ActionKind.FORWARD_STAGE]
    backwards = [action for action in actions if action.kind is ActionKind.BACKWARD_STAGE]
    monkeypatch.setattr("flowtrain.pipeline.executor.build_schedule", lambda *_, **__: ((*forwards, *backwards),))
    with pytest.raises(ScheduleError, match="holds 2 after .*more than its limit of 1"):
        checked_schedule("1f1b", even(1), num_microbatches=3, training=True, memory=MemoryStrategy.OFFLOAD)
