"""Timed stages: batches reach the trainer's stages, and times go to the slots of the plan."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowtrain.actors.reading import Fetched
from flowtrain.actors.timed_stages import TimedStages
from flowtrain.actors.whereabouts import Diary
from flowtrain.pipeline.executor import checked_schedule, execute
from flowtrain.pipeline.partition import build_partition
from flowtrain.training.clock import MicrobatchClock

NUM_MICROBATCHES = 3
WORK_S = 0.01


class Stages:
    """Notes its calls; every stage computes for a while."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def forward_stage(self, action: Any, microbatch: Any) -> None:
        self.calls.append(("forward", action.microbatch, microbatch))
        compute()

    def backward_stage(self, action: Any, microbatch: Any, *, is_last: bool) -> None:
        self.calls.append(("backward", action.microbatch, microbatch, is_last))
        compute()

    def start_transfers(self, launches: Any) -> None:
        self.calls += [("start", action.microbatch, microbatch) for action, microbatch in launches]

    def wait_transfer(self, action: Any) -> None:
        self.calls.append(("wait", action.microbatch))


def compute() -> None:
    started_s = time.thread_time()
    while time.thread_time() - started_s < WORK_S:
        pass


def fetched(number: int) -> Fetched:
    """In ``arrival`` order microbatch k is any slot."""
    batch: Any = f"batch {number}"
    return Fetched(NUM_MICROBATCHES - 1 - number, batch, 0.0)


@pytest.mark.parametrize("pp_rank", [0, 1])
@pytest.mark.parametrize("training", [True, False])
def test_batches_reach_the_stages_and_times_their_slots(pp_rank: int, training: bool) -> None:
    stages = Stages()
    clock = MicrobatchClock(torch.device("cpu")) if training else None
    schedule = checked_schedule("1f1b", build_partition(2, 2), num_microbatches=NUM_MICROBATCHES, training=training)
    execute(schedule[pp_rank], TimedStages(stages, clock, Diary()), fetched)
    for call in stages.calls:
        assert call[0] == "wait" or call[2] == f"batch {call[1]}"
    assert {call[0] for call in stages.calls} == {"forward", "start", "wait", *(["backward"] if training else [])}
    lasts = [call[3] for call in stages.calls if call[0] == "backward"]
    assert lasts == [False] * (len(lasts) - 1) + [True] * bool(lasts)
    if clock is not None:
        times = clock.times()
        assert len(times) == NUM_MICROBATCHES and all(seconds >= 2 * WORK_S for seconds in times)


def test_a_slots_time_is_that_of_the_microbatch_which_ran_in_it() -> None:
    stages = Stages()
    clock = MicrobatchClock(torch.device("cpu"))
    timed = TimedStages(stages, clock, Diary())
    action: Any = SimpleNamespace(microbatch=0)
    for number, repeats in ((0, 1), (1, 4), (2, 1)):
        for _ in range(repeats):
            timed.forward_stage(action, fetched(number))
    times = clock.times()
    assert times[1] >= 4 * WORK_S and times[1] == max(times)
