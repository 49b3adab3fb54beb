"""Which rank hangs, and that a slow backbone, a starved one and one that died are left alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.controller.hang_watch import ANSWER_S, HangWatch, find_hang
from flowtrain.controller.stalls import Hang, HangLimits
from flowtrain.controller.state import Role
from flowtrain.types.whereabouts import WAIT_FOR_DATA, Whereabouts
from tests.controller.fake_ray import FakeRay, Ref, died

LIMIT_S = 100.0
LIMITS = HangLimits(action_s=LIMIT_S, silence_s=60.0, warning_s=40.0)
ROUND_S = LIMITS.round_s + 1.0


def at(unit: int, place: int, for_s: float, may_last: bool = False) -> Whereabouts:
    return Whereabouts(unit, unit + 1, place, f"action {place}", for_s, may_last, 1)


def test_the_rank_behind_all_others_hangs_when_all_stand_still() -> None:
    answers = {"first": at(3, 9, 120.0), "second": at(3, 7, 121.0), "third": at(3, 9, 119.0)}
    what = "it has been in action 7 of step 4 for 121 s, more than limits.collective_timeout_s allows"
    assert find_hang(answers, {}, LIMITS) == Hang("second", what, 121.0)
    assert find_hang({**answers, "slow": at(2, 40, 130.0)}, {}, LIMITS).name == "slow"  # type: ignore[union-attr]


@pytest.mark.parametrize("moving", [at(3, 2, 99.0), at(3, 2, 500.0, may_last=True)])
def test_while_one_rank_moves_or_may_last_there_is_hope(moving: Whereabouts) -> None:
    assert find_hang({"first": at(3, 9, 500.0), "second": moving}, {}, LIMITS) is None


def test_a_rank_that_says_nothing_for_too_long_hangs_whatever_the_others_do() -> None:
    answers = {"first": at(3, 9, 5.0), "starved": at(3, 9, 5.0, may_last=True)}
    assert find_hang(answers, {"second": 59.0}, LIMITS) is None
    what = "it has not answered for 61 s, more than limits.silence_timeout_s allows"
    assert find_hang(answers, {"second": 61.0, "third": 60.5}, LIMITS) == Hang("second", what, 61.0)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.floats(0, 200), st.booleans()), max_size=6))
def test_nobody_hangs_within_the_limit(ranks: list[tuple[int, int, float, bool]]) -> None:
    answers = {str(number): at(*each) for number, each in enumerate(ranks)}
    hang = find_hang(answers, {}, LIMITS)
    stands_still = all(each.for_s >= LIMIT_S and not each.may_last for each in answers.values())
    assert (hang is not None) == (bool(answers) and stands_still)


class World:
    """Ranks that answer when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        self.ray = FakeRay(monkeypatch)
        self.now_s = 1000.0
        self.asked: dict[str, Ref] = {}
        self.dumped: list[str] = []
        self.found: list[Hang] = []
        ranks = {name: self._rank(name) for name in ("rank-0", "rank-1")}
        runs = {Ref(name): name for name in ranks}
        actors: Any = SimpleNamespace(of_role=lambda role: ranks if role is Role.BACKBONE else {}, runs=runs)
        self.runs = runs
        self.watch = HangWatch(actors, LIMITS, directory, self.found.append, lambda: self.now_s)

    def _rank(self, name: str) -> Any:
        def ask() -> Ref:
            self.asked[name] = Ref(name)
            return self.asked[name]

        def dump(directory: str) -> Ref:
            self.dumped.append(name)
            ref = Ref(name)
            ref.finish()
            return ref

        return SimpleNamespace(whereabouts=SimpleNamespace(remote=ask), dump_stacks=SimpleNamespace(remote=dump))

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.watch.poll()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    return World(monkeypatch, tmp_path)


def test_ranks_are_asked_only_while_no_unit_ends(world: World) -> None:
    world.wait(LIMITS.round_s)
    assert not world.asked
    world.wait(1.0)
    assert set(world.asked) == {"rank-0", "rank-1"}


def test_a_hang_is_told_once_its_stacks_are_kept(world: World) -> None:
    world.wait(ROUND_S)
    for name, ref in world.asked.items():
        ref.finish(at(0, 3 if name == "rank-1" else 5, LIMIT_S))
    world.wait(1.0)
    (hang,) = world.found
    assert hang.name == "rank-1" and "more than limits.collective_timeout_s allows" in hang.what
    assert "stacks of 2 of 2 ranks" in hang.what and sorted(world.dumped) == ["rank-0", "rank-1"]


def test_a_stopped_rank_is_found_by_its_silence(world: World) -> None:
    for _ in range(20):
        world.wait(ROUND_S)
        world.asked["rank-0"].finish(at(0, 5, 1.0))
        world.wait(ANSWER_S + 1.0)
        if world.found:
            break
    (hang,) = world.found
    assert hang.name == "rank-1" and "has not answered" in hang.what and world.dumped == ["rank-0"]


def test_the_time_that_the_driver_was_paused_is_not_counted(world: World) -> None:
    world.wait(100 * LIMIT_S)
    world.wait(ANSWER_S + 1.0)
    assert set(world.asked) == {"rank-0", "rank-1"} and not world.found


def test_a_rank_that_died_is_the_watchers_business(world: World) -> None:
    world.wait(ROUND_S)
    world.asked["rank-0"].finish(died())
    world.asked["rank-1"].finish(at(0, 3, LIMIT_S))
    world.wait(1.0)
    assert not world.found


def test_a_rank_that_has_returned_is_not_asked(world: World) -> None:
    world.runs.pop(next(ref for ref, name in world.runs.items() if name == "rank-0"))
    world.wait(ROUND_S)
    assert set(world.asked) == {"rank-1"}


def test_what_stands_still_is_known_before_it_hangs(world: World) -> None:
    world.wait(ROUND_S)
    world.asked["rank-0"].finish(Whereabouts(0, 1, 2, WAIT_FOR_DATA, 41.0, True, 1))
    world.asked["rank-1"].finish(Whereabouts(0, 1, 2, WAIT_FOR_DATA, 42.0, True, 1))
    world.wait(1.0)
    assert world.watch.standing() == ["rank-0, rank-1: in a wait for data for 42 s"] and not world.found
    world.wait(ROUND_S)
    world.asked["rank-0"].finish(at(0, 5, 500.0, may_last=True))
    for _ in range(4):
        world.wait(ANSWER_S + 1.0)
    assert world.watch.standing() == ["rank-1: no answer for 40 s"], "a checkpoint or an answer has another limit"
    world.watch.begin()
    assert not world.watch.standing()
