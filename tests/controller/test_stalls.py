"""When a warning says that no step ends, and of whom."""

from __future__ import annotations

from typing import Any

import pytest

from flowtrain.config.flow import LimitsConfig
from flowtrain.controller.stalls import LEAST_ROUND_S, ROUNDS, StallWatch, hang_limits, standing_text
from flowtrain.types.events import CheckpointWritten, UnitDone

LIMITS = LimitsConfig(stall_warning_s=60.0, start_timeout_s=300.0)
DONE: Any = object.__new__(UnitDone)


class World:
    def __init__(self) -> None:
        self.now_s = 1000.0
        self.standing: list[str] = ["encoder-0: no answer for 61 s"]
        self.warned: list[str] = []
        self.watch = StallWatch(LIMITS, lambda: self.standing, self.warned.append, lambda: self.now_s)

    def wait(self, seconds: float) -> int:
        """Let time pass a second at a time; returns how many warnings came."""
        before = len(self.warned)
        for _ in range(int(seconds)):
            self.now_s += 1.0
            self.watch.poll()
        return len(self.warned) - before


@pytest.fixture
def world() -> World:
    return World()


def test_the_first_step_has_the_time_of_a_start_and_later_ones_the_limit(world: World) -> None:
    assert world.wait(299.0) == 0 and world.wait(1.0) == 1
    world.watch.take(DONE)
    assert world.wait(59.0) == 0 and world.wait(1.0) == 1
    assert world.warned[-1].startswith("no step has ended for 60 s; encoder-0: no answer for 61 s.")
    assert "limits.silence_timeout_s" in world.warned[-1]
    assert world.wait(60.0) == 1 and "for 120 s" in world.warned[-1], "it is said again"


def test_units_that_end_and_nothing_else_is_progress(world: World) -> None:
    world.watch.take(DONE)
    for _ in range(5):
        assert world.wait(59.0) == 0
        world.watch.take(DONE)
    world.wait(59.0)
    world.watch.take(CheckpointWritten(1, "step-1", 1.0))
    assert world.wait(1.0) == 1


def test_a_long_step_in_which_everybody_moves_is_no_stall(world: World) -> None:
    world.watch.take(DONE)
    standing, world.standing = world.standing, []
    assert world.wait(500.0) == 0
    world.standing = standing
    assert world.wait(1.0) == 1, "who stands still later is named as soon as it is known"


def test_a_backbone_that_began_again_has_the_time_of_a_start_again(world: World) -> None:
    world.watch.take(DONE)
    world.watch.begin()
    assert world.wait(299.0) == 0


def test_actors_in_the_same_are_one_text() -> None:
    ranks = [(f"rank-{index}", "in a wait for data", 60.0 + index) for index in range(6)]
    assert standing_text([("encoder-0", "no answer", 61.4), *ranks]) == [
        "encoder-0: no answer for 61 s",
        "rank-0, rank-1, rank-2, rank-3 and 2 more: in a wait for data for 65 s",
    ]


def test_a_small_limit_asks_no_more_often_than_the_driver_looks() -> None:
    limits = hang_limits(LimitsConfig(stall_warning_s=0.1))
    assert limits.round_s == LEAST_ROUND_S and limits.counted_s(1.5) == 1.5
    assert limits.counted_s(500.0) == 2.0 * limits.round_s, "the driver was paused"


@pytest.mark.parametrize(("silence_s", "named"), [(5.0, "silence_timeout_s"), (50.0, "collective_timeout_s")])
def test_a_silent_actor_has_the_shorter_limit_and_it_is_named(silence_s: float, named: str) -> None:
    limits = hang_limits(LimitsConfig(collective_timeout_s=10.0, silence_timeout_s=silence_s, stall_warning_s=8.0))
    assert limits.silence_s == min(silence_s, 10.0) and limits.round_s == min(silence_s, 8.0) / ROUNDS
    assert named in limits.silent("encoder-0", 11.0).what
    assert "collective_timeout_s" in limits.busy("encoder-0", "the forward", 11.0).what
