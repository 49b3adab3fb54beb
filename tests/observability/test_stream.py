"""Whoever follows a run gets its events in order; a tracker that fails, hangs or is slow is off, alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, partialmethod, singledispatchmethod
from pathlib import Path
from typing import Any

import pytest

from flowtrain.errors import ConfigError
from flowtrain.observability import stream as stream_module
from flowtrain.observability import tracker as tracker_module
from flowtrain.observability.callback import Callback, check_callbacks, deliver
from flowtrain.observability.stream import EventStream
from flowtrain.observability.tracker import Tracker, described
from flowtrain.types.run_events import Noted, RunEvent, RunStarted, StepFinished
from tests.observability.events import CHECKPOINT, ENDED, EVALUATED, NOTED, QUARANTINED, RESTARTED, started

LIMIT_S = 30.0
"""Only ends a test that hangs."""


class Follower(Callback):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def _note(self, name: str, event: RunEvent) -> None:
        self.told.append(f"{name} {event.step}")

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            return partial(self._note, name)
        return super().__getattribute__(name)


def step(make_metrics: Any, number: int) -> StepFinished:
    return StepFinished(metrics=make_metrics(number))


class World:
    """A stream with a sink that keeps all events, and its trackers."""

    def __init__(self) -> None:
        self.stream = EventStream()
        self.told: list[RunEvent] = []
        self.stream.add(self.told.append)
        self.now_s = 0.0
        self.release = threading.Event()

    def track(self, callback: object, make: Callable[[], object] | None = None) -> Tracker:
        tracker = Tracker("mine", make or (lambda: callback), clock=lambda: self.now_s)
        self.stream.add_trackers([tracker])
        return tracker

    def warnings(self) -> list[str]:
        return [event.text for event in self.told if isinstance(event, Noted) and event.level == "warning"]

    def until_warned(self, emit: Callable[[], None]) -> None:
        """Emit events until the tracker's thread has failed."""
        limit_s = time.monotonic() + LIMIT_S
        while not self.warnings():
            assert time.monotonic() < limit_s, "no warning came"
            emit()
            time.sleep(0.001)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.release.set()


# --- sinks -----------------------------------------------------------------------------------------------------------


def test_each_event_has_a_method(make_metrics: Any) -> None:
    follower = Follower()
    events = [started(), step(make_metrics, 1), EVALUATED, CHECKPOINT, RESTARTED, QUARANTINED, NOTED, ENDED]
    for event in events:
        deliver(follower, event)
    assert follower.told == [
        *("on_run_start 0", "on_step 1", "on_evaluation 2", "on_checkpoint 2", "on_restart 2", "on_quarantine 2"),
        *("on_note 0", "on_run_end 4"),
    ]
    for event in events:
        deliver(Callback(), event)
        deliver(object(), event)  # no method is required


def test_notes_carry_the_last_step(world: World, make_metrics: Any) -> None:
    world.stream.note("before")
    world.stream.emit(step(make_metrics, 7))
    world.stream.emit(CHECKPOINT)  # of an earlier step
    world.stream.warn("after")
    notes = [(event.step, event.level, event.text) for event in world.told if isinstance(event, Noted)]
    assert notes == [(0, "info", "before"), (7, "warning", "after")]


def test_a_sink_that_training_needs_raises_and_one_that_it_does_not_goes_off(
    world: World, make_metrics: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(event: RunEvent) -> None:
        raise RuntimeError("Ray is gone")

    world.stream.add(fail, diagnostic="Ray's metrics")
    for number in (1, 2):
        world.stream.emit(step(make_metrics, number))
    assert [event.step for event in world.told] == [1, 2]
    assert caplog.text.count("Ray is gone") == 1 and "Ray's metrics could not be written" in caplog.text
    world.stream.add(fail)
    with pytest.raises(RuntimeError, match="Ray is gone"):
        world.stream.emit(NOTED)


# --- callbacks of a caller -------------------------------------------------------------------------------------------


class Misspelt(Callback):
    def on_stpe(self, event: StepFinished) -> None: ...


class Plain:
    """Is no ``Callback``; what is not called, such as a flag, may have any name."""

    on_gpu = True

    def on_step(self, event: StepFinished) -> None: ...


class PlainMisspelt(Plain):
    @classmethod
    def on_chekpoint(cls, event: RunEvent) -> None: ...


class Anything:
    def __getattr__(self, name: str) -> Any:
        return lambda event: None


class Partial:
    on_step = partialmethod(lambda self, mark, event: None, "x")


class Single:
    @singledispatchmethod
    def on_note(self, event: object) -> None: ...


class Given:
    @property
    def on_step(self) -> Any:
        raise AssertionError("no code of a callback runs")


@dataclass(slots=True)
class Slots:
    on_step: Any


class Hooked(Plain):
    """Keeps a hook, and names an error's class and a helper."""

    on_problem = RuntimeError

    def __init__(self) -> None:
        self.on_failure = self.on_steps = print

    def on_gpu_lost(self) -> None: ...

    def __dir__(self) -> list[str]:
        raise RuntimeError("closed")


class Elsewhere:
    """The interface of another library."""

    def on_step_end(self) -> None: ...

    def on_evaluate(self) -> None: ...


class Both(Callback, Elsewhere):
    def on_step_end(self) -> None: ...


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (Callback(), r"callbacks is of class Callback; give a list of objects, such as callbacks=\[Board\(\)\]"),
        (None, r"callbacks is of class NoneType; give a list"),
        (Plain, r"callbacks is the class Plain; give a list of objects: callbacks=\[Plain\(\)\]"),
        ([Plain(), Plain], r"callbacks\[1\] is the class Plain; give an object of it: Plain\(\)"),
        ([Misspelt()], r"callbacks\[0\], of class Misspelt, has a method on_stpe, .* did you mean on_step\?"),
        ([type("BothMisspelt", (Both,), {"on_stpe": lambda self: None})()], r"has a method on_stpe"),
        ([Elsewhere()], r"has a method on_step_end, .* did you mean on_step\?"),
        ([PlainMisspelt()], r"has a method on_chekpoint, which no event calls; did you mean on_checkpoint\?"),
        (["Plain"], r"callbacks\[0\], of class str, has none of the methods .* on_run_start, on_step"),
    ],
)
def test_what_cannot_follow_a_run_is_refused(given: Any, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        check_callbacks(given)


def test_objects_with_methods_may_follow_a_run() -> None:
    given = (Callback(), Plain(), Anything(), Follower(), Hooked(), Both())
    assert check_callbacks(given) == list(given)
    assert check_callbacks(each for each in given) == list(given)


@pytest.mark.parametrize("callback", [Partial(), Single(), Given(), Slots(print)], ids=lambda each: type(each).__name__)
def test_a_method_may_be_whatever_gives_something_to_call(callback: object) -> None:
    assert check_callbacks([callback]) == [callback]


# --- trackers --------------------------------------------------------------------------------------------------------


def test_a_tracker_hears_everything_in_order_and_of_the_start_first(world: World, make_metrics: Any) -> None:
    follower = Follower()
    world.track(follower)
    for event in (NOTED, QUARANTINED, started(), step(make_metrics, 1), NOTED, ENDED):
        world.stream.emit(event)
    world.stream.close()
    assert follower.told == [
        *("on_run_start 0", "on_note 0", "on_quarantine 2"),  # a bad row is found while models are still loaded
        *("on_step 1", "on_note 0", "on_run_end 4"),
    ]
    assert world.warnings() == []


def test_a_tracker_of_a_run_that_did_not_start_hears_of_its_end(world: World) -> None:
    follower = Follower()
    world.track(follower)
    world.stream.emit(NOTED)
    world.stream.emit(ENDED)
    world.stream.close()
    assert follower.told == ["on_note 0", "on_run_end 4"]


def test_a_tracker_runs_in_a_thread_of_its_own(world: World) -> None:
    threads: list[threading.Thread] = []

    class Where(Callback):
        def on_run_start(self, event: RunStarted) -> None:
            threads.append(threading.current_thread())

    world.track(Where())
    world.stream.emit(started())
    world.stream.close()
    (thread,) = threads
    assert thread is not threading.current_thread() and thread.daemon and thread.name == "tracker mine"


class Failing(Callback):
    """Raises at a step."""

    def on_step(self, event: StepFinished) -> None:
        raise ValueError("no such project")


def test_a_tracker_that_raises_is_off_with_one_warning_and_others_go_on(world: World, make_metrics: Any) -> None:
    follower = Follower()
    world.track(Failing())
    world.track(follower)
    world.stream.emit(started())
    world.until_warned(lambda: world.stream.emit(step(make_metrics, 1)))
    for number in (2, 3):
        world.stream.emit(step(make_metrics, number))
    world.stream.close()
    (warning,) = world.warnings()
    assert warning.startswith("tracker mine is off from now on, training goes on: ValueError: no such project (")
    assert {"on_step 2", "on_step 3"} <= set(follower.told)
    assert {event.step for event in world.told if isinstance(event, StepFinished)} == {1, 2, 3}


def test_a_tracker_that_cannot_be_built_is_off(world: World) -> None:
    def refuse() -> object:
        raise SystemExit("no key")

    world.track(None, refuse)
    world.until_warned(lambda: world.stream.emit(started()))
    world.stream.close()
    (warning,) = world.warnings()
    assert warning.startswith("tracker mine is off from now on, training goes on: SystemExit: no key (")


def test_an_error_at_the_end_is_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    class Late(Callback):
        def on_run_end(self, event: RunEvent) -> None:
            raise OSError("connection reset")

    world.track(Late())
    world.stream.emit(started())
    world.stream.emit(ENDED)
    world.stream.close()
    (warning,) = (text for text in caplog.messages if "is off" in text)
    assert warning.startswith("tracker mine is off from now on, training goes on: OSError: connection reset (")
    assert world.stream.off == [f"mine was off from step 4 on: {warning.partition('goes on: ')[2]}"]


def test_a_tracker_that_raises_tells_where_and_its_traceback_is_logged(
    world: World, make_metrics: Any, caplog: pytest.LogCaptureFixture
) -> None:
    world.track(Failing())
    world.stream.emit(started())
    world.until_warned(lambda: world.stream.emit(step(make_metrics, 3)))
    world.stream.close()
    line = Failing.on_step.__code__.co_firstlineno + 1
    (warning,) = world.warnings()
    assert warning.endswith(f"test_stream.py:{line}, in on_step)")
    assert 'raise ValueError("no such project")' in caplog.text and "Traceback" in caplog.text
    (off,) = world.stream.off
    assert off.startswith("mine was off from step 3 on: ValueError: no such project (")


def test_a_tracker_is_off_from_the_last_step_that_it_got(world: World, make_metrics: Any) -> None:
    def refuse() -> object:
        raise SystemExit("no key")

    world.stream = EventStream(first_step=5)
    hanging = Hanging(world.release)
    world.track(hanging)
    world.track(None, refuse)
    world.stream.emit(started())
    world.stream.emit(step(make_metrics, 6))
    assert hanging.entered.wait(LIMIT_S)
    world.now_s = tracker_module.MAX_CALL_S + 1.0
    world.stream.emit(step(make_metrics, 9))
    world.stream.close()
    assert sorted(text.partition(":")[0] for text in world.stream.off) == [
        "mine was off from step 5 on",
        "mine was off from step 6 on",
    ]


def test_the_place_of_an_error_does_not_tell_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(Path(__file__).parent))
    try:
        Failing().on_step(NOTED)  # type: ignore[arg-type]
    except ValueError as error:
        assert described(error).startswith("ValueError: no such project (~/test_stream.py:")
    with pytest.raises(SyntaxError) as caught:
        compile("(", "boards.py", "exec")
    assert described(caught.value).endswith("(boards.py, line 1)")


class Hanging(Callback):
    """Does not return from a step until it is released."""

    def __init__(self, release: threading.Event) -> None:
        self._release = release
        self.entered = threading.Event()

    def on_step(self, event: StepFinished) -> None:
        self.entered.set()
        self._release.wait(LIMIT_S)


def test_a_tracker_that_hangs_is_off_and_the_end_does_not_wait_for_it(
    world: World, make_metrics: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "FINISH_S", LIMIT_S)
    hanging = Hanging(world.release)
    tracker = world.track(hanging)
    world.stream.emit(started())
    world.stream.emit(step(make_metrics, 1))
    assert hanging.entered.wait(LIMIT_S)
    world.now_s = tracker_module.MAX_CALL_S
    world.stream.emit(step(make_metrics, 2))
    assert world.warnings() == [], "it may take as long"
    world.now_s += 0.1
    world.stream.emit(step(make_metrics, 3))
    assert world.warnings() == ["tracker mine is off from now on, training goes on: a call has not returned for 120 s"]
    world.stream.close()
    assert tracker._thread.is_alive(), "the end waits for nobody who is off"


def test_a_tracker_that_is_slow_keeps_few_events_and_is_left_behind_at_the_end(
    world: World, make_metrics: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stream_module, "FINISH_S", 0.01)
    hanging = Hanging(world.release)
    world.track(hanging)
    world.stream.emit(started())
    world.stream.emit(step(make_metrics, 1))
    assert hanging.entered.wait(LIMIT_S)
    for number in range(2, 5):
        world.stream.emit(step(make_metrics, number))
    world.stream.close()
    (line,) = [message for message in caplog.messages if "mine" in message]
    assert "it has not taken the last 4 events, and the run ends without it" in line, "three steps and the end"


def test_a_tracker_that_falls_too_far_behind_is_off(
    world: World, make_metrics: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_module, "MAX_WAITING", 8)
    hanging = Hanging(world.release)
    world.track(hanging)
    world.stream.emit(started())
    for number in range(1, 30):
        world.stream.emit(step(make_metrics, number))
        assert number > 1 or hanging.entered.wait(LIMIT_S)
    assert world.warnings() == ["tracker mine is off from now on, training goes on: it is 8 events behind"]
    assert [event.step for event in world.told if isinstance(event, StepFinished)] == list(range(1, 30))
