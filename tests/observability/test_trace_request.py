"""Requests for traces through files of a run's directory: asked, taken, answered, refused, withdrawn."""

from __future__ import annotations

import json
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flowtrain.config.load import load_config
from flowtrain.config.run import RunConfig
from flowtrain.errors import ConfigError, FlowTrainError
from flowtrain.observability import trace_request as module
from flowtrain.observability.run_dir import RunDir, held_run_dir, run_dir
from flowtrain.observability.trace_request import (
    TraceAnswer,
    TraceRequest,
    TraceState,
    TraceWindow,
    answer_request,
    read_answer,
    request_trace,
    take_request,
)

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
LIMIT_S = 30.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.001)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load_config(QUICKSTART, [f"runs_dir={tmp_path}"])


@contextmanager
def training(run: RunDir, config: RunConfig, carry_out: Callable[[TraceRequest], None]) -> Iterator[None]:
    """A run that takes requests until the block ends."""
    ended = threading.Event()

    def serve() -> None:
        while not ended.wait(0.001):
            if (request := take_request(run)) is not None:
                carry_out(request)

    with held_run_dir(config):
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(LIMIT_S)


def record(run: RunDir, *names: str) -> Callable[[TraceRequest], None]:
    """Answer a request with a window that has these files beside the trace."""

    def carry_out(request: TraceRequest) -> None:
        directory = run.windows / "steps-4-6"
        directory.mkdir(parents=True)
        for name in ("trace.json", *names):
            (directory / name).write_text("{}")
        answer = TraceAnswer(request.id, TraceState.RECORDING, "traces/steps-4-6", 4, 6)
        answer_request(run, answer)
        done = TraceAnswer(request.id, TraceState.DONE, "traces/steps-4-6", 4, 6)
        answer_request(run, done)

    return carry_out


def test_a_request_is_taken_and_answered(config: RunConfig) -> None:
    run = run_dir(config)
    with training(run, config, record(run, "profiler-encoder-0.json", "profiler-backbone.json")):
        window = request_trace(run, 3, profiler=True)
    directory = run.root / "traces" / "steps-4-6"
    names = ("trace.json", "profiler-backbone.json", "profiler-encoder-0.json")
    assert window == TraceWindow(directory, 4, 6, tuple(directory / name for name in names))


def test_the_run_learns_what_is_asked_for(config: RunConfig) -> None:
    run, asked = run_dir(config), []

    def refuse(request: TraceRequest) -> None:
        asked.append((request.steps, request.profiler, request.memory))
        answer_request(run, TraceAnswer(request.id, TraceState.REFUSED, reason="another trace is under way"))

    with training(run, config, refuse), pytest.raises(ConfigError, match="another trace is under way"):
        request_trace(run, 7, memory=True)
    assert asked == [(7, False, True)]


def test_a_kind_of_file_that_is_missing_is_named(config: RunConfig) -> None:
    run = run_dir(config)
    with training(run, config, record(run)):
        window = request_trace(run, 3, memory=True)
    assert window.note is not None and "no actor has written a memory file" in window.note


def test_only_the_owner_can_read_a_request(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    run, modes = run_dir(config), []

    def look(*args: object) -> TraceAnswer:
        modes.extend(stat.S_IMODE(path.stat().st_mode) for path in run.root.glob(".trace-request*"))
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_wait", look)
    with held_run_dir(config), pytest.raises(KeyboardInterrupt):
        request_trace(run, 3)
    assert modes == [0o600]
    assert take_request(run) is None, "a request that nobody took is withdrawn"


def test_where_nothing_trains_nothing_is_asked(config: RunConfig) -> None:
    run = run_dir(config)
    run.root.mkdir()
    with pytest.raises(ConfigError, match="no process trains this run now"):
        request_trace(run, 3)
    assert list(run.root.iterdir()) == []


@pytest.mark.parametrize("steps", [0, -1, module.MAX_STEPS + 1])
def test_a_number_of_steps_that_makes_no_sense_is_refused(config: RunConfig, steps: int) -> None:
    with held_run_dir(config), pytest.raises(ConfigError, match=rf"--steps \({steps}\)"):
        request_trace(run_dir(config), steps)


def test_two_requests_at_once_are_refused(config: RunConfig) -> None:
    run = run_dir(config)
    with held_run_dir(config):
        (run.root / ".trace-request.json").write_text("{}")
        with pytest.raises(ConfigError, match="has not yet taken another request"):
            request_trace(run, 3)


def test_a_run_that_ends_meanwhile_ends_the_wait(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    run, looks = run_dir(config), []

    def is_held(self: RunDir) -> bool:
        looks.append(1)
        return len(looks) < 5

    monkeypatch.setattr(RunDir, "is_held", is_held)
    run.root.mkdir()
    with pytest.raises(FlowTrainError, match="the run ended, or was killed"):
        request_trace(run, 3)
    assert take_request(run) is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"id": "a"}', '{"id": "a", "steps": 0}', '{"id": "a", "steps": "3"}'])
def test_a_file_that_is_no_request_is_removed(config: RunConfig, text: str, caplog: pytest.LogCaptureFixture) -> None:
    run = run_dir(config)
    run.root.mkdir()
    (run.root / ".trace-request.json").write_text(text)
    assert take_request(run) is None and list(run.root.iterdir()) == []
    assert "was no request for a trace" in caplog.text


def test_an_answer_comes_back_as_it_went_in(config: RunConfig) -> None:
    run = run_dir(config)
    run.root.mkdir()
    assert read_answer(run) is None
    answer = TraceAnswer("a", TraceState.DONE, "traces/steps-1-2", 1, 2, "the run ended after step 2")
    answer_request(run, answer)
    assert read_answer(run) == answer
    (run.root / ".trace-answer.json").write_text(json.dumps({"id": "a", "state": "unheard of"}))
    assert read_answer(run) is None


@pytest.mark.parametrize(("directory", "where"), [(None, ""), ("traces/steps-13-17", "; what was recorded until then")])
def test_a_window_without_a_step_is_an_error(config: RunConfig, directory: str | None, where: str) -> None:
    run = run_dir(config)

    def end(request: TraceRequest) -> None:
        answer_request(run, TraceAnswer(request.id, TraceState.DONE, directory, 13, 12, "the run ended after step 12"))

    with training(run, config, end), pytest.raises(FlowTrainError) as caught:
        request_trace(run, 5)
    assert f"no step was left to trace: the run ended after step 12{where}" in str(caught.value)
