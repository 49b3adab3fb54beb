"""Which encoders and feeders hang, and that those that wait, start, ended or died are left alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.actors.whereabouts import longest
from flowtrain.controller.producer_watch import ProducerWatch, is_stuck
from flowtrain.controller.stalls import ROUNDS, Hang, HangLimits
from flowtrain.controller.state import Role
from flowtrain.types.whereabouts import LOAD, START, WAIT_FOR_MODEL, Whereabouts
from tests.controller.fake_ray import FakeRay, Ref, died

LIMIT_S, START_LIMIT_S = 100.0, 100.0
LIMITS = HangLimits(action_s=LIMIT_S, silence_s=60.0, warning_s=40.0)
ROUND_S = LIMITS.round_s


def doing(for_s: float, may_last: bool = False, what: str = "the forward") -> Whereabouts:
    return Whereabouts(-1, 0, 1, what, for_s, may_last, 1)


DOINGS = st.builds(doing, st.floats(0, 500), st.booleans())


@given(DOINGS)
def test_only_work_beyond_the_limit_hangs(where: Whereabouts) -> None:
    assert is_stuck(where, LIMIT_S) == (not where.may_last and where.for_s >= LIMIT_S)


@given(DOINGS, DOINGS)
def test_of_two_threads_one_that_hangs_is_seen(first: Whereabouts, second: Whereabouts) -> None:
    hangs = [is_stuck(each, LIMIT_S) for each in (first, second)]
    assert is_stuck(longest(first, second), LIMIT_S) == any(hangs)


class Producer:
    """Answers when a test says so."""

    def __init__(self) -> None:
        self.calls: list[Ref] = []
        self.whereabouts = SimpleNamespace(remote=self._ask)

    def _ask(self) -> Ref:
        self.calls.append(Ref("whereabouts"))
        return self.calls[-1]


class World:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ray = FakeRay(monkeypatch)
        self.now_s = 1000.0
        self.found: list[Hang] = []
        self.producers = {"encoder-0": Producer(), "feeder-0": Producer()}
        self.runs = {Ref(name): name for name in self.producers}
        actors: Any = SimpleNamespace(of_role=self._of_role, runs=self.runs)
        self.watch = ProducerWatch(actors, LIMITS, START_LIMIT_S, self.found.append, lambda: self.now_s)

    def _of_role(self, role: Role) -> dict[str, Producer]:
        return {name: each for name, each in self.producers.items() if name.startswith(role.value)}

    def wait(self, **answers: Any) -> None:
        """Let a round pass; these answer first what they were asked."""
        for name, answer in answers.items():
            self.producers[f"{name}-0"].calls[-1].finish(answer)
        self.now_s += ROUND_S
        self.watch.poll()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_one_that_works_too_long_at_one_thing_is_named_with_it(world: World) -> None:
    world.wait()
    world.wait(encoder=doing(99.0), feeder=doing(500.0, may_last=True))
    assert not world.found and world.watch.standing() == ["encoder-0: in the forward for 99 s"]
    world.wait(encoder=doing(101.0, what="the decoding of batch 2 of unit 9"), feeder=doing(0.0))
    (hang,) = world.found
    assert hang.name == "encoder-0" and hang.what.startswith("it has been in the decoding of batch 2 of unit 9 for 101")
    assert "limits.collective_timeout_s" in hang.what and hang.for_s == 101.0


def test_a_stopped_one_is_found_by_its_silence_and_asked_once(world: World) -> None:
    world.wait()
    world.wait(encoder=doing(0.0), feeder=doing(0.0))
    for number in range(int(LIMITS.silence_s / ROUND_S)):
        assert not world.found
        assert world.watch.standing() == ([f"feeder-0: no answer for {number * ROUND_S:.0f} s"] if number > 3 else [])
        world.wait(encoder=doing(0.0))
    assert world.found == [
        Hang("feeder-0", "it has not answered for 60 s, more than limits.silence_timeout_s allows", 60.0)
    ]
    assert len(world.producers["feeder-0"].calls) == 2, "calls do not pile up at a stopped process"


def test_one_that_loads_its_model_has_the_time_of_a_start(world: World) -> None:
    for _ in range(int(START_LIMIT_S / ROUND_S)):
        world.wait()
        assert not world.found
    world.wait()
    assert {hang.name for hang in world.found} == {"encoder-0", "feeder-0"}


@pytest.mark.parametrize("what", [LOAD, WAIT_FOR_MODEL, START])
def test_one_that_said_that_it_loads_has_it_too(world: World, what: str) -> None:
    world.wait()
    world.wait(encoder=doing(1.0, True, what), feeder=doing(0.0, True))
    for _ in range(int(START_LIMIT_S / ROUND_S)):
        assert not world.found
        world.wait(feeder=doing(0.0, True))
    assert [hang.what for hang in world.found] == [
        "it has not answered for 100 s, more than limits.start_timeout_s allows"
    ]


def test_one_that_is_gone_does_not_stand_still(world: World) -> None:
    world.wait()
    world.wait(encoder=doing(0.0), feeder=doing(0.0))
    for _ in range(5):
        world.wait(encoder=doing(0.0))
    assert world.watch.standing() == ["feeder-0: no answer for 50 s"]
    world.runs.pop(next(ref for ref, name in world.runs.items() if name == "feeder-0"))
    world.wait(encoder=doing(0.0))
    assert not world.watch.standing()


def test_the_time_that_the_driver_was_paused_is_not_counted(world: World) -> None:
    world.wait()
    world.wait(encoder=doing(0.0), feeder=doing(0.0))
    world.now_s += 100 * LIMIT_S
    world.wait()
    assert not world.found


def test_one_that_ended_or_died_is_the_watchers_business_and_its_successor_begins_anew(world: World) -> None:
    world.wait()
    world.wait(encoder=died(), feeder=doing(0.0))
    world.producers["encoder-0"] = Producer()
    world.runs.pop(next(ref for ref, name in world.runs.items() if name == "feeder-0"))
    for _ in range(2 * ROUNDS):
        world.wait()
    assert not world.found and len(world.producers["encoder-0"].calls) == 1
