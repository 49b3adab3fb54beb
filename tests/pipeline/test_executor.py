"""The executor: the order of its calls, and that every valid list computes the plain gradients, over threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.errors import ScheduleError
from flowtrain.pipeline import executor
from flowtrain.pipeline.actions import (
    Action,
    ActionKind,
    MemoryKind,
    MemoryStrategy,
    Schedule,
    StageModule,
    schedule_text,
    stage_memory,
)
from flowtrain.pipeline.executor import carried_schedule, checked_schedule, execute
from flowtrain.pipeline.schedules.build import build_schedule
from flowtrain.pipeline.schedules.one_f_one_b import forward_only, one_f_one_b
from tests.pipeline.partitions import ANY_PARTITION, even, parse_actions, with_encoder
from tests.pipeline.random_schedules import random_schedule, shuffle_legally, shuffled
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


@given(st.randoms(use_true_random=False), ANY_PARTITION, st.integers(0, 6), st.booleans())
def test_lists_with_an_encoder_compute_the_plain_gradients(random, partition, num_microbatches, in_parts):
    """Of the named schedule, or in a random order with the encoder's parts joining in the backbone's first stage."""
    parts = [1] * num_microbatches
    if in_parts:
        parts = [random.randint(1, 3) for _ in parts]
        lists = random_schedule(random, partition, parts, join_at=len(partition.of_module(StageModule.ENCODER)))
    else:
        lists = one_f_one_b(partition, num_microbatches)
    weights = [random.randint(-3, 3) for _ in partition.stages]
    microbatches = [[random.randint(-5, 5) for _ in range(random.randint(0, 6))] for _ in parts]
    num_frozen = sum(not stage.has_backward for stage in partition.stages)
    found = pipeline_gradients(lists, weights, microbatches, parts, partition)
    assert found == plain_gradients(weights, microbatches, num_frozen)


@given(st.randoms(use_true_random=False), st.integers(1, 4), st.integers(1, 3), st.integers(0, 5))
def test_any_legal_order_computes_the_plain_gradients(random, pp_size, chunks_per_rank, num_microbatches):
    """With stages on random ranks, and microbatches cut into parts that join at some stage."""
    partition = shuffled(random, pp_size, chunks_per_rank)
    parts = [random.randint(1, 3) for _ in range(num_microbatches)]
    lists = random_schedule(random, partition, parts, join_at=random.randint(0, len(partition.stages)))
    weights = [random.randint(-3, 3) for _ in partition.stages]
    microbatches = [[random.randint(-5, 5) for _ in range(random.randint(1, 6))] for _ in parts]
    assert pipeline_gradients(lists, weights, microbatches, parts) == plain_gradients(weights, microbatches)


@given(st.randoms(use_true_random=False), st.integers(1, 4), st.integers(1, 2), st.integers(1, 4))
def test_any_legal_permutation_computes_the_plain_gradients(random, pp_size, chunks_per_rank, num_microbatches):
    partition = even(pp_size, chunks_per_rank)
    lists = one_f_one_b(partition, num_microbatches)
    lists = shuffle_legally(random, lists, partition, num_microbatches, num_tries=60)
    weights = [random.randint(-3, 3) for _ in range(pp_size * chunks_per_rank)]
    microbatches = [[random.randint(-5, 5) for _ in range(random.randint(1, 6))] for _ in range(num_microbatches)]
    assert pipeline_gradients(lists, weights, microbatches) == plain_gradients(weights, microbatches)


def test_microbatches_are_fetched_in_their_order_whichever_runs_first():
    log = log_of(parse_actions("F s0 m1\nB s0 m1\nF s0 m0\nB s0 m0"))
    assert log == ["ask 0", "ask 1", "F1 b", "B1 b", "release b", "F0 c", "B0 c last", "release c"]


def test_a_microbatch_of_forwards_alone_is_released_after_the_last():
    (first, _) = one_f_one_b(with_encoder(2, "own"), 1)
    assert [entry for entry in log_of(first) if "F" in entry or "B" in entry or "release" in entry] == [
        *("F0 c", "F0 c", "B0 c last", "release c")
    ]


@given(st.randoms(use_true_random=False), ANY_PARTITION, st.integers(0, 4), st.booleans())
def test_carried_lists_are_read_and_checked(random, partition, num_microbatches, training):
    lists = random_schedule(random, partition, [1] * num_microbatches, training=training)
    sizes = {"num_microbatches": num_microbatches, "training": training}
    assert carried_schedule(schedule_text(lists), partition, **sizes) == lists
    if num_microbatches:
        last = schedule_text(lists)[-1]
        with pytest.raises(ScheduleError):
            carried_schedule((*schedule_text(lists)[:-1], last[:-1]), partition, **sizes)
        with pytest.raises(ScheduleError, match="cannot be read: action 'F s0'"):
            carried_schedule((*schedule_text(lists)[:-1], (*last, "F s0")), partition, **sizes)


@pytest.mark.parametrize("num_parts", [1, 2])
def test_carried_lists_may_cut_images_and_not_tokens(num_parts):
    cut = [part for k in range(num_parts) for part in (f"F encoder s0 m0.{k}",)]
    sizes = {"num_microbatches": 1, "training": True}
    carried_schedule(((*cut, "F s0 m0", "B s0 m0"),), with_encoder(1, "first"), **sizes)
    backbone = [f"{kind} s0 m0.{k}" for kind in "FB" for k in range(num_parts)]
    with pytest.raises(ScheduleError, match=r"F s0 m0\.0: the backbone runs whole microbatches"):
        carried_schedule(((*cut, *backbone),), with_encoder(1, "first"), **sizes)


def test_carried_actions_without_a_strategy_get_the_configured_one():
    memory = {(StageModule.BACKBONE, 0): stage_memory([MemoryKind.KEEP, MemoryKind.RECOMPUTE])}
    found = carried_schedule((("F s0 m0", "B s0 m0"),), even(1), num_microbatches=1, training=True, memory=memory)
    assert schedule_text(found) == (("F s0 m0 keep*1+recompute*1", "B s0 m0 keep*1+recompute*1"),)


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


def test_threads_that_need_the_same_lists_build_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []

    def build(*arguments: Any, **keywords: Any) -> Schedule:
        built.append(threading.get_ident())
        time.sleep(0.05)  # long enough for all to ask meanwhile
        return build_schedule(*arguments, **keywords)

    monkeypatch.setattr(executor, "build_schedule", build)
    executor._checked_schedule.cache_clear()
    begin = threading.Barrier(4)

    def ask() -> Schedule:
        begin.wait()
        return checked_schedule("1f1b", even(2), num_microbatches=3, training=True)

    with ThreadPoolExecutor(4) as threads:
        found = [each.result() for each in [threads.submit(ask) for _ in range(4)]]
    assert len(built) == 1 and all(each is found[0] for each in found)
