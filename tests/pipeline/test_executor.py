"""The executor: order, last backward, microbatches asked late and released early."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from flowtrain.pipeline.actions import Action
from flowtrain.pipeline.executor import execute
from flowtrain.pipeline.schedules.one_f_one_b import forward_only, one_f_one_b


@dataclass
class Recorder:
    log: list[str] = field(default_factory=list)

    def next_microbatch(self, k: int) -> str:
        self.log.append(f"ask {k}")
        return "abc"[-k - 1]  # some other order than the list's, as when arrival decides

    def release(self, microbatch: str) -> None:
        self.log.append(f"release {microbatch}")

    def forward_stage(self, action: Action, microbatch: str) -> None:
        self.log.append(f"F{action.microbatch} {microbatch}")

    def backward_stage(self, action: Action, microbatch: str, *, is_last: bool) -> None:
        self.log.append(f"B{action.microbatch} {microbatch}{' last' if is_last else ''}")


def test_training_asks_runs_and_releases_one_by_one():
    recorder = Recorder()
    execute(one_f_one_b(1, 2)[0], recorder, recorder.next_microbatch, recorder.release)
    assert recorder.log == [
        *("ask 0", "F0 c", "B0 c", "release c"),
        *("ask 1", "F1 b", "B1 b last", "release b"),
    ]


def test_evaluation_releases_after_forward():
    recorder = Recorder()
    execute(forward_only(2), recorder, recorder.next_microbatch, recorder.release)
    assert recorder.log == ["ask 0", "F0 c", "release c", "ask 1", "F1 b", "release b"]


def test_a_microbatch_lives_until_its_last_action():
    forwards = forward_only(2)
    backwards = one_f_one_b(1, 2)[0][1::2]
    recorder = Recorder()
    execute((*forwards, *backwards), recorder, recorder.next_microbatch, recorder.release)
    assert recorder.log == [
        *("ask 0", "F0 c", "ask 1", "F1 b"),
        *("B0 c", "release c", "B1 b last", "release b"),
    ]


def test_transfers_are_refused():
    recorder = Recorder()
    with pytest.raises(NotImplementedError, match="pipeline_parallel_size"):
        execute(one_f_one_b(2, 1)[0], recorder, recorder.next_microbatch)
