"""How a run ended, its numbers, and what limited it."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowtrain.observability.report.outcome import (
    KeyFigures,
    State,
    disturbed_steps,
    eval_points,
    key_figures,
    outcome_of,
    steady_steps,
    verdict_of,
)
from flowtrain.observability.report.run_data import RunData, read_run
from tests.report.runs import START_S, event, started, step_record, write_lines, write_run


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_run(tmp_path, num_steps=40)


def with_events(directory: Path, *events: dict[str, Any]) -> RunData:
    write_lines(directory / "events.jsonl", events)
    return read_run(directory)


def ended(outcome: str, reason: str | None = None, after_s: float = 50.0) -> dict[str, Any]:
    return event("run_ended", 40, after_s, outcome=outcome, reason=reason, duration_s=60.0)


def test_a_run_says_how_it_ended(directory: Path) -> None:
    done = outcome_of(read_run(directory))
    assert (done.state, done.step, done.num_steps, done.started_s) == (State.DONE, 40, 40, START_S - 6.0)
    failed = outcome_of(with_events(directory, started(), ended("failed", "a rank died")))
    assert (failed.state, failed.reason, failed.duration_s) == (State.FAILED, "a rank died", 60.0)
    assert outcome_of(with_events(directory, started(), ended("stopped"))).state is State.STOPPED
    assert outcome_of(with_events(directory, started(), ended("exploded"))).state is State.KILLED


def test_a_run_that_says_nothing_was_killed_unless_it_made_all_steps(directory: Path) -> None:
    assert outcome_of(with_events(directory, started(num_steps=100))).state is State.KILLED
    assert outcome_of(with_events(directory, started(num_steps=40))).state is State.DONE
    (directory / "events.jsonl").unlink()
    old = outcome_of(read_run(directory))
    assert old.state is State.DONE and old.num_steps == 40
    assert old.started_s == pytest.approx(START_S + 1.0 - 2.2) and old.duration_s == pytest.approx(41.2)
    for name in ("metrics.jsonl", "events.jsonl"):
        (directory / name).unlink(missing_ok=True)
    assert outcome_of(read_run(directory)).state is State.EMPTY


def test_a_resumed_run_counts_the_time_of_all_starts(directory: Path) -> None:
    first, second = [started(), ended("stopped", after_s=30.0)], [started(20, 1000.0, 20), ended("done", None, 1050.0)]
    resumed = outcome_of(with_events(directory, *first, *second))
    assert (resumed.state, resumed.num_starts, resumed.duration_s) == (State.DONE, 2, 120.0)
    again = outcome_of(with_events(directory, *first, started(20, 1000.0, 20, num_steps=99)))
    assert again.state is State.KILLED, "the end of an earlier start does not count"


def test_a_run_that_a_process_holds_is_running(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowtrain.observability.run_dir.RunDir.is_held", lambda self: True)
    running = outcome_of(with_events(directory, started(num_steps=100)), now=START_S + 77.0)
    assert (running.state, running.duration_s) == (State.RUNNING, 77.0)


def test_a_run_on_emulated_devices_cannot_go_on(directory: Path) -> None:
    events = started(num_steps=100), ended("stopped")
    assert outcome_of(with_events(directory, *events)).resume.endswith("begins anew; steps 1 to 40 are lost")
    with (directory / "config.yaml").open("a") as file:
        file.write("model: {device: emulated}\n")
    assert outcome_of(with_events(directory, *events)).resume == ""
    (directory / "config.yaml").unlink()
    (directory / "metrics.jsonl").write_text('{"schema": 2, "step": 1, "emulated": "emulated h200"}\n')
    assert outcome_of(with_events(directory, *events)).resume == ""


def test_the_last_checkpoint_is_what_the_directory_has(directory: Path) -> None:
    events = started(num_steps=100), *(event("checkpoint", step, float(step)) for step in (20, 40)), ended("stopped")
    assert outcome_of(with_events(directory, *events)).checkpoint_step == 40, "the events alone were copied"
    checkpoints = directory / "checkpoints"
    checkpoints.mkdir()
    assert outcome_of(with_events(directory, *events)).checkpoint_step is None, "they were deleted"
    for name in ("step-00000020", "step-00000030", "unreached-step-00000050-abc"):
        (checkpoints / name).mkdir()
        (checkpoints / name / "meta.json").touch()
    (checkpoints / "step-00000060").mkdir()  # incomplete
    found = outcome_of(with_events(directory, *events))
    assert (
        found.resume
        == f"flowtrain train {directory}/config.yaml --resume goes on after step 30; steps 31 to 40 are lost"
    )


def test_a_resume_whose_actors_have_not_started_yet_is_running(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowtrain.observability.run_dir.RunDir.is_held", lambda self: True)
    events = [started(num_steps=100), ended("stopped", after_s=50.0)]
    for opened_s, state in ((START_S - 1.0, State.STOPPED), (START_S + 500.0, State.RUNNING)):
        os.utime(directory / "plan.yaml", (opened_s, opened_s))
        assert outcome_of(with_events(directory, *events)).state is state


def test_numbers_leave_out_the_first_step_of_each_start(directory: Path) -> None:
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        is_first = record["step"] in (1, 21)
        record.update(step_time_s=100.0 if is_first else 2.0, starved_s=90.0 if is_first else 0.5, num_tokens=3000)
        record.update(blocked_s=1.0, mfu=0.0 if is_first else 0.4, loss=float(record["step"]))
    write_lines(directory / "metrics.jsonl", records)
    run = with_events(directory, started(), started(20, 1000.0, 20))
    assert steady_steps(run).sum() == 38
    found = key_figures(run)
    assert (found.tokens_per_s, found.starved_share, found.num_steady) == (1500.0, 0.25, 38)
    assert found.blocked_share == pytest.approx(0.25), "of two encoders"
    assert found.mfu == pytest.approx(0.4) and found.step_time_s == 2.0
    assert (found.first_loss, found.last_loss, found.num_last) == (1.0, 39.5, 2)


@pytest.mark.parametrize(
    ("told", "disturbed"),
    [
        (event("lost", 20, 20.5, role="encoder", name="encoder-0", reason="killed", hung_s=None), [21]),
        (event("restart", 20, 20.5, role="encoder", name="encoder-0", reason="killed", down_s=2.0), [21, 22, 23]),
        (
            event("restart", 20, 20.5, role="feeder", name="feeder-0", reason="silent", hung_s=2.0, down_s=0.1),
            [19, 20, 21],
        ),
        (event("restart", 20, 20.0, role="backbone", name="rank", reason="", hung_s=None, down_s=0.5), [20, 21]),
        (
            event("restart", 20, 20.5, role="backbone", name="rank", reason="earlier version", down_s=0.5),
            [20, 21],
        ),
        (event("restart", 60, 90.0, role="coordinator", name="coordinator", reason="killed", down_s=2.0), []),
    ],
)
def test_steps_in_which_an_actor_was_lost_say_nothing_of_the_speed(
    directory: Path, told: dict[str, Any], disturbed: list[int]
) -> None:
    run = with_events(directory, started(num_steps=60), told)
    assert [int(step) for step in run.steps.step[disturbed_steps(run)]] == disturbed
    assert [int(step) for step in run.steps.step[~steady_steps(run)]] == [1, *disturbed]


def test_held_out_losses_by_set_and_from_a_run_without_events(directory: Path) -> None:
    def evaluation(step: int, name: str, loss: float | None) -> dict[str, Any]:
        return event("evaluation", step, float(step), name=name, loss=loss)

    run = with_events(
        directory,
        evaluation(10, "a", 3.0),
        evaluation(20, "a", 2.0),
        evaluation(30, "a", 2.5),
        evaluation(30, "b", None),
        evaluation(20, "a", 1.5),
    )
    assert key_figures(run).eval_losses["a"] == (2.5, 1.5, 20), "a resume evaluated step 20 again"
    assert math.isnan(key_figures(run).eval_losses["b"][0])
    (directory / "events.jsonl").unlink()
    rng = np.random.default_rng(0)
    write_lines(directory / "metrics.jsonl", [step_record(1, rng), step_record(2, rng) | {"eval_loss": 4.0}])
    assert {name: losses.tolist() for name, (_, losses) in eval_points(read_run(directory)).items()} == {
        "held-out": [4.0]
    }


FIGURES: dict[str, Any] = {
    **dict.fromkeys(("first_loss", "last_loss", "tokens_per_s", "tokens_per_s_per_device", "samples_per_s", "mfu")),
    **dict.fromkeys(("step_time_s", "backbone_mfu", "pool_peak_nbytes")),
    "eval_losses": {},
    "num_last": 5,
    "starved_share": 0.02,
    "blocked_share": 0.8,
    "fill": 0.95,
    "imbalance": 0.0,
    "num_steady": 100,
}


@pytest.mark.parametrize(
    ("changes", "limit", "advice"),
    [
        ({}, "The limit is the backbone: it waited for data in 2.0 % of its time, and encoders for it in 80 %", ""),
        ({"fill": 0.5}, "The limit is the backbone", "Microbatches are 50 % full"),
        ({"imbalance": 0.3}, "The limit is the backbone", "The costliest rank has 30 % more work"),
        ({"blocked_share": None}, "Computation is the limit: the ranks waited for data in 2.0 % of their time", ""),
        ({"starved_share": 0.4, "blocked_share": 0.0}, "Encoders limit the speed", "Add encoders"),
        (
            {"starved_share": 0.4, "blocked_share": 0.3},
            "Data or the pool limit the speed",
            "Both sides wait: raise data.num_feeders",
        ),
        ({"starved_share": 0.4, "blocked_share": None}, "Data limits the speed", "Raise data.num_feeders"),
        ({"num_steady": 2}, "Too few steps to tell", ""),
        ({"starved_share": None}, "Too few steps to tell", ""),
    ],
)
def test_what_limits_a_run(directory: Path, changes: dict[str, Any], limit: str, advice: str) -> None:
    found = verdict_of(read_run(directory), KeyFigures(**{**FIGURES, **changes}))
    assert found.limit.replace("\u00a0", " ").startswith(limit)
    assert "\n".join(found.advice).replace("\u00a0", " ").startswith(advice)
    assert bool(found.advice) == bool(advice)
