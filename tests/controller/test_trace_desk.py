"""Requests for traces of a running run: what coordinator and actors are asked, and what the one who asked learns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowtrain.controller import trace_desk as module
from flowtrain.controller.run_traces import RunTraces
from flowtrain.controller.state import Role
from flowtrain.controller.trace_desk import TraceDesk
from flowtrain.observability.run_dir import RunDir
from flowtrain.observability.trace_request import TraceAnswer, TraceState, read_answer
from flowtrain.types.tracing import TraceOrder, TraceSteps
from tests.controller.fake_ray import FakeRay, Ref, died
from tests.controller.test_run_traces import run, spans_of
from tests.disk import full_from

FIRST, NUM_STEPS = 4, 20


class FakeActor:
    """Notes what it is asked; its answers are a test's."""

    def __init__(self, name: str) -> None:
        self.orders: list[TraceOrder] = []
        self.ended = 0
        self.answers: list[Ref] = []
        self.trace = SimpleNamespace(remote=self._trace)
        self.end_trace = SimpleNamespace(remote=self._end)
        self._name = name

    def _trace(self, order: TraceOrder) -> Ref:
        self.orders.append(order)
        self.answers.append(Ref(f"trace of {self._name}"))
        return self.answers[-1]

    def _end(self) -> None:
        self.ended += 1


class World:
    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ray = FakeRay(monkeypatch)
        self.files = RunDir(root)
        self.traces = RunTraces(self.files, num_done=FIRST - 1, num_steps=0)
        self.backbone, self.encoder = FakeActor("backbone"), FakeActor("encoder-0")
        self.asked: list[int] = []
        self.notes: list[str] = []
        roles = {Role.BACKBONE: {"backbone": self.backbone}, Role.ENCODER: {"encoder-0": self.encoder}}
        actors: Any = SimpleNamespace(link=SimpleNamespace(ask=self._ask), of_role=roles.__getitem__)
        self.desk = TraceDesk(self.files, self.traces, actors, NUM_STEPS, self.notes.append)

    def _ask(self, question: Callable[..., Any], num_steps: int) -> TraceSteps:
        assert question.__name__ == "trace"
        self.asked.append(num_steps)
        return TraceSteps(FIRST, FIRST + num_steps - 1)

    def request(self, name: str, steps: int = 2, **options: bool) -> None:
        record = {"id": name, "steps": steps, **options}
        (self.files.root / ".trace-request.json").write_text(json.dumps(record))
        self.desk.poll()

    @property
    def answer(self) -> TraceAnswer:
        answer = read_answer(self.files)
        assert answer is not None
        return answer


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_without_a_request_nobody_is_asked(world: World) -> None:
    for _ in range(3):
        world.desk.poll()
    world.desk.close()
    assert world.asked == [] and read_answer(world.files) is None


def test_a_request_is_carried_out_and_answered(world: World) -> None:
    world.request("a", steps=2)
    directory = "traces/steps-4-5"
    assert world.asked == [2]
    assert world.answer == TraceAnswer("a", TraceState.RECORDING, directory, 4, 5)
    assert world.backbone.orders == [TraceOrder(5, str(world.files.root / directory), False, False)]
    assert world.encoder.orders == [], "encoders record spans anyway"
    run(world.traces, [4])
    world.desk.poll()
    assert world.answer.state is TraceState.RECORDING
    run(world.traces, [5])
    world.desk.poll()
    assert world.answer == TraceAnswer("a", TraceState.DONE, directory, 4, 5)
    assert len(world.notes) == 2 and "steps 4 to 5" in world.notes[0]
    world.request("b")
    assert world.answer.id == "b", "the next request is taken"


def test_profiles_are_waited_for_and_encoders_are_told_the_end(world: World) -> None:
    world.request("a", steps=1, profiler=True)
    assert world.encoder.orders == world.backbone.orders and world.backbone.orders[0].profiler
    run(world.traces, [4])
    world.desk.poll()
    world.desk.poll()
    assert world.encoder.ended == 1 and world.answer.state is TraceState.RECORDING
    world.backbone.answers[0].finish(("profiler-backbone.json could not be written: no room",))
    world.desk.poll()
    assert world.answer.state is TraceState.RECORDING
    world.encoder.answers[0].finish(())
    world.desk.poll()
    assert world.answer.state is TraceState.DONE
    assert world.answer.reason == "profiler-backbone.json could not be written: no room"


def test_an_actor_that_died_writes_no_profile(world: World) -> None:
    world.request("a", steps=1, memory=True)
    run(world.traces, [4])
    world.backbone.answers[0].finish(())
    world.encoder.answers[0].finish(died())
    world.desk.poll()
    assert world.answer.state is TraceState.DONE
    assert "an actor has written no profile" in (world.answer.reason or "")


def test_profiles_that_do_not_come_are_not_waited_for_forever(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.request("a", steps=1, profiler=True)
    run(world.traces, [4])
    monkeypatch.setattr(module, "PROFILES_S", -1.0)
    world.desk.poll()
    assert world.answer.state is TraceState.DONE and "2 actors have not written" in (world.answer.reason or "")


def test_a_second_request_is_refused_while_one_is_under_way(world: World) -> None:
    world.request("a")
    world.request("b")
    assert world.answer.state is TraceState.REFUSED and world.answer.id == "b"
    assert world.answer.reason == "another trace is under way, up to step 5; ask again when it is complete"
    assert world.asked == [2]
    run(world.traces, [4, 5])
    world.desk.poll()
    assert (world.answer.id, world.answer.state) == ("a", TraceState.DONE)


def test_a_window_ends_with_the_run(world: World) -> None:
    world.request("a", steps=5000)
    assert (world.answer.first_step, world.answer.last_step) == (FIRST, NUM_STEPS)
    assert world.answer.directory == f"traces/steps-{FIRST}-{NUM_STEPS}"


def test_a_run_that_ends_earlier_says_how_far_it_came(world: World) -> None:
    world.request("a", steps=10)
    run(world.traces, [4, 5])
    world.desk.close()
    assert world.answer == TraceAnswer("a", TraceState.DONE, "traces/steps-4-13", 4, 5, "the run ended after step 5")


def test_a_run_that_ends_with_the_last_step_has_it_all(world: World) -> None:
    world.request("a", steps=1)
    run(world.traces, [4])
    world.desk.close()
    assert (world.answer.state, world.answer.last_step, world.answer.reason) == (TraceState.DONE, 4, None)


def test_a_disk_that_refuses_the_directory_refuses_the_request(world: World) -> None:
    (world.files.root / "traces").write_text("no directory")
    world.request("a")
    assert world.answer.state is TraceState.REFUSED and "the trace could not be begun" in (world.answer.reason or "")
    assert world.backbone.orders == []


def test_an_error_of_the_desk_ends_no_run(world: World, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*args: Any) -> TraceSteps:
        raise TimeoutError("the coordinator did not answer")

    world.desk._actors.link.ask = fail
    world.request("a")
    assert "training goes on" in caplog.text and world.answer.state is TraceState.REFUSED
    assert not world.traces.has_window
    world.desk.close()


def test_whoever_asked_learns_that_the_disk_was_full(world: World) -> None:
    world.request("a", steps=2)
    with full_from((world.files.windows / "steps-4-5" / "trace.json").stat().st_size):
        run(world.traces, [4])
    run(world.traces, [5])
    world.desk.poll()
    assert world.answer.state is TraceState.DONE and "trace.json is not complete" in (world.answer.reason or "")
    world.request("b", steps=1)
    world.desk.close()
    assert world.answer.reason == "the run ended after step 5", "the next one is whole again"


def test_after_the_last_step_has_begun_a_request_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world.desk, "_num_steps", FIRST - 1)
    world.request("a", steps=100)
    assert world.answer.state is TraceState.REFUSED and world.backbone.orders == []
    assert "no step is left to trace: the run has begun all of its 3 steps" in (world.answer.reason or "")
    assert not world.files.windows.exists()


def test_a_run_that_ends_before_the_first_step_says_so_and_leaves_no_directory(world: World) -> None:
    world.request("a", steps=5)
    world.desk.close()
    reason = "the run ended after step 3, before step 4 was done"
    assert world.answer == TraceAnswer("a", TraceState.DONE, None, 4, 3, reason)
    assert list(world.files.windows.iterdir()) == [] and world.notes[-1] == f"traced no step: {reason}"


def test_what_was_recorded_of_a_first_step_that_was_not_done_is_kept(world: World) -> None:
    world.request("a", steps=5)
    world.traces.take(spans_of(4))
    world.desk.close()
    assert (world.answer.directory, world.answer.last_step) == ("traces/steps-4-8", 3)
    assert (world.files.windows / "steps-4-8" / "trace.json").is_file()
