"""``flowtrain trace`` against a directory: what it prints, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from flowtrain import api
from flowtrain.cli.app import app
from flowtrain.config.load import load_config
from flowtrain.observability import trace_request
from flowtrain.observability.run_dir import RunDir, held_run_dir, open_run_dir
from flowtrain.observability.trace_request import TraceAnswer, TraceRequest, TraceState, TraceWindow

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return open_run_dir(load_config(QUICKSTART, [f"runs_dir={tmp_path / 'runs'}"]), resume=False)


def test_files_and_what_is_missing_are_shown(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def trace(path: Path, steps: int, *, progress, **options: bool) -> TraceWindow:  # type: ignore[no-untyped-def]
        asked.append((path, steps, options))
        progress(TraceAnswer("a", TraceState.RECORDING, "traces/steps-4-23", 4, 23))
        directory = run.windows / "steps-4-23"
        return TraceWindow(directory, 4, 23, (directory / "trace.json",), "no actor has written a memory file yet")

    monkeypatch.setattr(api, "trace", trace)
    result = CliRunner().invoke(app, ["trace", str(run.root), "--steps", "20", "--memory"])
    assert result.exit_code == 0, result.output
    assert asked == [(run.root, 20, {"profiler": False, "memory": True})]
    assert "tracing steps 4 to 23" in result.stdout and str(run.windows / "steps-4-23" / "trace.json") in result.stdout
    assert "no actor has written a memory file yet" in result.stderr


def test_a_run_that_does_not_train_is_refused(run: RunDir) -> None:
    result = CliRunner().invoke(app, ["trace", str(run.root)])
    assert result.exit_code == 2 and "no process trains this run now" in result.stderr


def test_a_run_that_is_not_there_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["trace", str(tmp_path / "none")])
    assert result.exit_code == 2 and "no run" in result.stderr


def test_a_run_that_has_no_step_left_fails_the_command(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(run: RunDir, request: TraceRequest, progress: object) -> TraceAnswer:
        return TraceAnswer(request.id, TraceState.DONE, None, 41, 40, "the run ended after step 40")

    monkeypatch.setattr(trace_request, "_wait", answer)
    with held_run_dir(load_config(run.config)):
        result = CliRunner().invoke(app, ["trace", str(run.root), "--steps", "100"])
    assert result.exit_code == 1 and result.stdout == ""
    assert "no step was left to trace: the run ended after step 40" in result.stderr
