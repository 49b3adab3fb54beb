"""How a run stands now."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from flowtrain.observability.report import status
from flowtrain.observability.report.outcome import State
from flowtrain.observability.report.status import Said, status_of
from tests.report.runs import START_S, event, started, write_lines, write_run


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_run(tmp_path, num_steps=60)


def test_a_run_that_goes_on(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowtrain.observability.run_dir.RunDir.is_held", lambda self: True)
    os.utime(directory / "plan.yaml", (START_S, START_S))
    events = [
        started(num_steps=100),
        event("evaluation", 50, 50.0, name="shapes", loss=2.5),
        event("checkpoint", 50, 51.0, duration_s=1.0, nbytes=1, best_of=None),
        event("note", 50, 50.0, level="info", text="fine"),
        *(event("note", 50, 50.0, level="warning", text=f"warning {number}") for number in range(5)),
        event("restart", 55, 55.0, role="encoder", name="encoder-0", reason="died", down_s=None),
    ]
    write_lines(directory / "events.jsonl", events)
    found = status_of(directory, now=START_S + 70.0)
    assert (found.state, found.step, found.num_steps, found.age_s) == (State.RUNNING, 60, 100, 10.0)
    assert found.eta_s == pytest.approx(40.0), "at a step a second"
    assert found.eval_losses == {"shapes": 2.5} and found.checkpoint_step == 50 and found.num_restarts == 1
    assert found.warnings == tuple(Said(f"warning {number}", 20.0) for number in (2, 3, 4))
    assert found.step_age_s == 10.0 and found.start_age_s == 70.0 and found.recovering == ()
    assert found.pool_bound_nbytes == 2 * 16_777_216 + 20_055_438
    assert found.tokens_per_s is not None and 1000 < found.tokens_per_s < 2000
    record = found.as_record()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert (record["schema"], record["state"], record["directory"]) == (2, "running", str(directory))


def test_a_run_that_ended_has_no_time_left(directory: Path) -> None:
    found = status_of(directory, now=START_S + 5000.0)
    assert (found.state, found.eta_s, found.reason) == (State.DONE, None, "")
    assert found.resume == ""


def test_a_run_that_was_stopped_goes_on_after_its_checkpoint(directory: Path) -> None:
    ended = event("run_ended", 60, 61.0, outcome="stopped", reason="on request", duration_s=61.0)
    saved = event("checkpoint", 60, 60.5, duration_s=1.0, nbytes=1, best_of=None)
    write_lines(directory / "events.jsonl", [started(num_steps=100), saved, ended])
    assert status_of(directory).resume == f"flowtrain train {directory}/config.yaml --resume goes on after step 60"


def test_only_the_end_of_a_long_file_is_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = status_of(directory, now=START_S)
    size = (directory / "metrics.jsonl").stat().st_size
    monkeypatch.setattr(status, "TAIL_NBYTES", size // 2)
    lines = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    (directory / "metrics.jsonl").write_text("rubbish" + "".join(lines))  # at the start, which is not read
    assert status_of(directory, now=START_S) == whole


def test_a_run_that_only_began(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: new\n")
    found = status_of(tmp_path)
    assert (found.state, found.step, found.loss, found.age_s) == (State.EMPTY, 0, None, None)
    assert found.notes == ("the run has not finished a step",)
    json.dumps(found.as_record(), allow_nan=False)


def test_a_loss_that_is_not_finite_is_null_in_json(directory: Path) -> None:
    write_lines(directory / "events.jsonl", [started(), event("evaluation", 5, 5.0, name="x", loss=None)])
    found = status_of(directory)
    assert math.isnan(found.eval_losses["x"]) and found.as_record()["eval_losses"] == {"x": None}


def lost(name: str, time_s: float, **values: Any) -> dict[str, Any]:
    role = name.split("-")[0]
    return event("lost", 5, time_s, role=role, name=name, reason="killed", hung_s=None, **values)


def back(name: str, time_s: float) -> dict[str, Any]:
    return event("restart", 5, time_s, role=name.split("-")[0], name=name, reason="killed", down_s=1.0)


@pytest.mark.parametrize(
    ("events", "missing"),
    [
        ([], []),
        ([lost("encoder-0", 61.0)], ["encoder-0"]),
        ([lost("encoder-0", 61.0), back("encoder-0", 62.0)], []),
        ([lost("encoder-0", 61.0), back("encoder-0", 62.0), lost("encoder-0", 63.0)], ["encoder-0"]),
        ([lost("encoder-0", 60.5), lost("encoder-0", 61.0, given_up=True)], []),
        ([lost("encoder-0", -1.0)], []),
        ([lost("encoder-0", 61.0), started()], ["encoder-0"]),
        (
            [lost("encoder-0", 61.0), lost("backbone-0", 62.0), lost("coordinator", 63.0), back("backbone-0", 64.0)],
            ["encoder-0"],
        ),
    ],
)
def test_actors_that_do_not_work_again_yet_are_named(
    directory: Path, monkeypatch: pytest.MonkeyPatch, events: list[dict[str, Any]], missing: list[str]
) -> None:
    monkeypatch.setattr("flowtrain.observability.run_dir.RunDir.is_held", lambda self: True)
    os.utime(directory / "plan.yaml", (START_S, START_S))
    write_lines(directory / "events.jsonl", [started(num_steps=100), *events])
    found = status_of(directory, now=START_S + 70.0)
    assert [said.text for said in found.recovering] == [f"{name}: killed" for name in missing]
    assert all(said.age_s is not None and 5.0 < said.age_s < 10.0 for said in found.recovering)


def test_while_a_resume_starts_the_last_step_is_not_its_own(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowtrain.observability.run_dir.RunDir.is_held", lambda self: True)
    os.utime(directory / "plan.yaml", (START_S + 100.0, START_S + 100.0))
    found = status_of(directory, now=START_S + 130.0)
    assert (found.state, found.step, found.step_age_s, found.start_age_s) == (State.RUNNING, 60, None, 30.0)


def test_rates_of_a_run_that_loses_actors_all_the_time_are_recent(directory: Path) -> None:
    down = {"role": "encoder", "name": "encoder-0", "reason": "killed"}
    write_lines(directory / "events.jsonl", [started(), event("restart", 5, 5.0, down_s=900.0, **down)])
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    records += [{**records[-1], "step": step, "timestamp": START_S + step, "mfu": 0.01} for step in range(61, 161)]
    write_lines(directory / "metrics.jsonl", records)
    found = status_of(directory)
    assert found.mfu == pytest.approx(0.01) and found.num_recent == status.RECENT_STEPS
