"""Files of runs that are damaged, old, growing, or not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.config.secrets import HIDDEN, redacted
from flowtrain.errors import ConfigError
from flowtrain.observability.report.reading import Notes, records, yaml_mapping
from flowtrain.observability.report.run_data import read_run
from flowtrain.observability.report.steps import steps_of
from tests.report.runs import event, started, step_record, write_lines, write_run

JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = ["step", "loss", "pool", "slot_imbalance", "source_losses", "plan_digest", "read_nbytes_by_transport", "skipped"]


def read(path: Path, notes: Notes | None = None) -> list[dict[str, Any]]:
    return list(records(path, notes or Notes()))


def test_damaged_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    path, notes = tmp_path / "metrics.jsonl", Notes()
    path.write_bytes(b'{"step": 1}\nrubbish\n[1]\n\xff\xfe\n{"step": 2}\n' + b"[" * 100_000 + b"\n")
    assert [each["step"] for each in read(path, notes)] == [1, 2]
    assert notes.texts == ("metrics.jsonl: line 2 and 3 more cannot be read as JSON objects; they are left out",)


def test_a_torn_last_line_is_no_damage(tmp_path: Path) -> None:
    path, notes = tmp_path / "metrics.jsonl", Notes()
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [each["step"] for each in read(path, notes)] == [1, 2]
    assert notes.texts == () and read(tmp_path / "absent.jsonl", notes) == []


@given(st.integers(1, 400))
def test_the_end_of_a_file_has_whole_lines_alone(tmp_path_factory: pytest.TempPathFactory, nbytes: int) -> None:
    path, notes = tmp_path_factory.mktemp("tail") / "x.jsonl", Notes()
    lines = [json.dumps({"step": step}) + "\n" for step in range(20)]
    path.write_text("".join(lines))
    found = [each["step"] for each in records(path, notes, nbytes)]
    assert found == list(range(20))[20 - len(found) :] and notes.texts == ()
    assert sum(len(line) for line in lines[20 - len(found) :]) <= nbytes


@given(st.lists(st.fixed_dictionaries({}, optional={key: JSON for key in KEYS}), max_size=6))
def test_no_value_of_a_line_stops_the_reading(found: list[dict[str, Any]]) -> None:
    steps = steps_of([*found, {"step": 5, "loss": 1.0}])
    assert len(steps) >= 1 and (np.diff(steps.step) > 0).all()
    assert steps["loss"][steps.step == 5][-1] == 1.0
    assert len(steps.digests) == len(steps) == len(steps["no such column"])
    assert all(len(column) == len(steps) for column in (*steps.columns.values(), *steps.source_losses.values()))


def test_columns_of_a_run_with_older_and_newer_lines() -> None:
    older = {"step": 1, "loss": 2.0, "plan_digest": "a"}
    pool = [
        {"role": "encoder", "rank": 0, "tier": "dram", "used_nbytes": 5, "bound_nbytes": 10},
        {"role": "feeder", "rank": 0, "tier": "dram", "used_nbytes": 2, "bound_nbytes": 10},
    ]
    newer = {"step": 2, "loss": None, "pool": pool, "slot_imbalance": [0.1, 0.3], "source_losses": {"x": 3.0}}
    steps = steps_of([newer | {"read_nbytes_by_transport": {"local": 7}}, older, {"loss": 9.0}, older | {"loss": 1.5}])
    assert steps.step.tolist() == [1, 2] and steps["loss"][0] == 1.5 and np.isnan(steps["loss"][1])
    assert steps["pool_dram_used"][1] == 7 and steps["pool_dram_bound"][1] == 20
    assert steps["slot_imbalance_mean"][1] == pytest.approx(0.2) and steps["slot_imbalance_max"][1] == 0.3
    assert steps.source_losses["x"][1] == 3.0 and np.isnan(steps.source_losses["x"][0])
    assert steps.read_nbytes == {"local": 7.0} and steps.digests == ("a", "")


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent: there is no such directory; give a run's directory"):
        read_run(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"not a run's directory \(it has neither config.yaml nor metrics.jsonl\)"):
        read_run(tmp_path)


def test_an_empty_run_and_a_damaged_one_are_noted(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: new\n")
    assert read_run(tmp_path).notes == ("the run has not finished a step",)
    (tmp_path / "config.yaml").write_text("name: [\n")
    (tmp_path / "plan.yaml").write_text("just text")
    (tmp_path / "profile.json").write_text("{")
    write_lines(tmp_path / "metrics.jsonl", [step_record(1, np.random.default_rng(0))])
    run = read_run(tmp_path)
    first, *others = run.notes
    assert first.startswith("config.yaml cannot be read: line") and run.name == tmp_path.name
    assert others[0].startswith("there is no events.jsonl: the run is of an earlier version")
    assert others[1] == "plan.yaml cannot be read: it is no mapping of keys"
    assert others[2].startswith("profile.json cannot be read")


def test_a_file_of_events_that_is_damaged_is_not_said_to_be_missing(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: new\n")
    write_lines(tmp_path / "metrics.jsonl", [step_record(1, np.random.default_rng(0))])
    (tmp_path / "events.jsonl").write_text("rubbish\n")
    assert read_run(tmp_path).notes == (
        "events.jsonl: line 1 cannot be read as JSON objects; they are left out",
        "events.jsonl has no event, so that restarts, checkpoints and how it ended are not known",
    )


def test_steps_and_encoders_of_a_run(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, num_steps=30))
    assert (run.name, run.mode, run.num_steps, run.num_encoders) == ("quickstart", "decoupled", 30, 2)
    assert run.planned_pool_nbytes == 2 * 16_777_216 + 20_055_438
    assert run.start_steps == (1,) and not run.is_held and run.notes == ()


def test_the_starts_of_a_resumed_run(tmp_path: Path) -> None:
    directory = write_run(tmp_path, num_steps=30)
    write_lines(directory / "events.jsonl", [started(), started(20, 100.0, 20, num_steps=40), event("note", 1, 1.0)])
    run = read_run(directory)
    assert run.start_steps == (1, 21) and run.num_steps == 40


def test_a_mapping_that_is_not_there_is_empty(tmp_path: Path) -> None:
    notes = Notes()
    assert yaml_mapping(tmp_path / "plan.yaml", notes) == {} and notes.texts == ()


def test_secrets_are_left_out_of_a_configuration() -> None:
    values = {
        "model": {"image_token": "<image>", "tokenizer": "assets/tokenizer"},
        "scheduler": {"microbatch_tokens": 512},
        "observability": {"tracker_options": {"wandb": {"api_key": "hunter2"}}},
        "data": {"sources": [{"path": "s3://user:hunter2@bucket/x", "image_root": "https://h/x?sig=hunter2"}]},
        "extra": {"hf_token": "hunter2", "password": "hunter2", "AWS_SECRET_ACCESS_KEY": "hunter2", "token": None},
    }
    shown = redacted(values)
    assert "hunter2" not in repr(shown)
    assert shown["model"] == values["model"] and shown["scheduler"] == values["scheduler"]
    assert shown["extra"] == {
        "hf_token": HIDDEN, "password": HIDDEN, "AWS_SECRET_ACCESS_KEY": HIDDEN, "token": None
    }  # fmt: skip
    assert shown["data"]["sources"][0]["path"] == HIDDEN


def test_evaluations_and_checkpoints_that_a_resume_makes_again_are_left_out(tmp_path: Path) -> None:
    directory = write_run(tmp_path, num_steps=30)
    before = [event(kind, step, float(step)) for step in (10, 20, 30) for kind in ("evaluation", "checkpoint", "note")]
    later = [started(20, 100.0, 20), event("evaluation", 30, 130.0), started(0, 200.0), event("restart", 1, 201.0)]
    for events, evaluated in ((before, [10, 20, 30]), ([*before, *later[:2]], [10, 20, 30]), ([*before, *later], [])):
        write_lines(directory / "events.jsonl", [started(), *events])
        run = read_run(directory)
        assert [each["step"] for each in run.of_kind("evaluation")] == evaluated
        assert len(run.of_kind("note")) == 3, "what happened stays"
    write_lines(directory / "events.jsonl", [started(), *before, *later[:1]])
    run = read_run(directory)
    assert [each["step"] for each in run.of_kind("evaluation")] == [10, 20]
    assert [each["step"] for each in run.of_kind("checkpoint")] == [10, 20]


def test_what_a_run_that_went_back_made_again_is_shown_once(tmp_path: Path) -> None:
    directory = write_run(tmp_path, num_steps=30)
    first = [event("evaluation", 10, 10.0), event("checkpoint", 10, 11.0), event("evaluation", 20, 20.0)]
    back = event("restart", 10, 30.0, role="backbone", name="rank", reason="killed", steps_again=12)
    dead = event("restart", 20, 35.0, role="encoder", name="encoder-0", reason="killed", steps_again=0)
    again = event("evaluation", 20, 40.0)
    write_lines(directory / "events.jsonl", [started(), *first, back, again, dead])
    run = read_run(directory)
    assert [(each["step"], each["timestamp"]) for each in run.of_kind("evaluation")] == [
        (10, first[0]["timestamp"]),
        (20, again["timestamp"]),
    ]
    assert [each["step"] for each in run.of_kind("checkpoint")] == [10] and len(run.of_kind("restart")) == 2
