"""``events.jsonl``: a line for each thing that a run tells."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowtrain.observability import event_file as event_file_module
from flowtrain.observability.event_file import MAX_TEXT_LENGTH, EventFile
from flowtrain.observability.files import read_json_lines
from flowtrain.types.run_events import StepFinished
from tests.disk import full_from
from tests.observability.events import (
    CHECKPOINT,
    ENDED,
    EVALUATED,
    GENERATED,
    LOST,
    NOTED,
    QUARANTINED,
    RESTARTED,
    T0,
    started,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_line_has_exactly_the_documented_keys(path: Path, make_metrics: Any) -> None:
    file = EventFile(path)
    for event in (started(), EVALUATED, CHECKPOINT, LOST, RESTARTED, NOTED, QUARANTINED, ENDED):
        file.take(event)
    file.take(StepFinished(metrics=make_metrics(1)))
    head = {"schema": 1, "timestamp": T0}
    found = lines(path)  # before close: it can be followed while the run goes on
    assert found == [
        {
            **head,
            "event": "run_started",
            "step": 0,
            "run": "small",
            "mode": "decoupled",
            "num_steps": 4,
            "resumed_from": None,
            "roles": {"coordinator": 1, "encoder": 2, "feeder": 1, "backbone": 1},
            "device": "cpu",
            "versions": {"flowtrain": "0.1.0", "torch": "2.13.0", "ray": "2.60.0"},
        },
        {
            **head,
            "event": "evaluation",
            "step": 2,
            "name": "held-out",
            "loss": 0.5,
            "num_samples": 4,
            "num_target_tokens": 9,
            "duration_s": 1.5,
            "generated": [
                {
                    "source": "cats",
                    "row": 3,
                    "prompt": "what is <b>this</b>?",
                    "reference": "a cat",
                    "text": "a **dog**",
                    "images": ["generated/2/cat.png"],
                }
            ],
        },
        {**head, "event": "checkpoint", "step": 2, "duration_s": 0.25, "nbytes": 1000, "best_of": None},
        {
            **head,
            "event": "lost",
            "step": 2,
            "role": "encoder",
            "name": "encoder-1",
            "reason": "silent",
            "hung_s": 9.0,
            "given_up": False,
        },
        {
            **head,
            "event": "restart",
            "step": 2,
            "role": "encoder",
            "name": "encoder-1",
            "reason": "killed",
            "hung_s": None,
            "down_s": None,
            "steps_again": 0,
        },
        {**head, "event": "note", "step": 0, "level": "info", "text": "sharding: full"},
        {
            **head,
            "event": "quarantined",
            "step": 2,
            "num_rejected": 3,
            "position": 17,
            "source": "cats",
            "row": 5,
            "reason": "corrupt_image",
        },
        {
            **head,
            "event": "run_ended",
            "step": 4,
            "outcome": "stopped",
            "reason": "on request",
            "duration_s": 60.0,
        },
    ]
    assert all(list(line)[:4] == ["schema", "timestamp", "event", "step"] for line in found)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    file.close()
    file.close()


def test_long_texts_are_cut_and_what_is_not_finite_is_null(path: Path) -> None:
    file = EventFile(path)
    long = "x" * (MAX_TEXT_LENGTH + 1)
    file.take(replace(EVALUATED, loss=float("nan"), generated=(replace(GENERATED, prompt=long, text="käse\n"),)))
    file.take(replace(NOTED, text=long))
    evaluation, note = lines(path)
    assert evaluation["loss"] is None and evaluation["generated"][0]["text"] == "käse\n"
    assert len(evaluation["generated"][0]["prompt"]) == len(note["text"]) == MAX_TEXT_LENGTH


def test_a_resume_appends_also_after_a_torn_line(path: Path) -> None:
    first = EventFile(path)
    first.take(NOTED)
    first.close()
    with path.open("a") as torn:
        torn.write('{"schema": 1, "ev')
    second = EventFile(path)
    second.take(ENDED)
    second.close()
    assert [line["event"] for line in lines(path)] == ["note", "run_ended"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_on_a_full_disk_the_run_goes_on_and_lines_are_written_later(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = EventFile(path)
    file.take(NOTED)
    with full_from(path.stat().st_size + 10):
        for _ in range(3):
            file.take(QUARANTINED)
        assert [record["event"] for record in read_json_lines(path)] == ["note"], "no line is torn"
    file.take(ENDED)
    assert [line["event"] for line in lines(path)] == ["note", *["quarantined"] * 3, "run_ended"]
    assert caplog.text.count("events.jsonl could not be written, it is tried again later") == 1


def test_memory_holds_few_lines_that_cannot_be_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_file_module, "MAX_WAITING_NBYTES", 500)
    file = EventFile(path)
    file.take(NOTED)
    with full_from(path.stat().st_size):
        for _ in range(50):
            file.take(QUARANTINED)
    file.take(ENDED)
    kept = [line["event"] for line in lines(path)]
    assert kept[0] == "note" and kept[-1] == "run_ended" and 1 <= kept.count("quarantined") < 10


def test_a_place_that_cannot_be_written_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = EventFile(tmp_path / "absent" / "events.jsonl")
    for _ in range(2):
        file.take(NOTED)
    file.close()
    assert caplog.text.count("events.jsonl could not be written") == 1


def test_a_file_that_is_no_longer_one_is_tried_again_without_open_files_left(path: Path) -> None:
    path.write_text('{"schema": 1}\nno object\n{"schema": 1}\n')
    file = EventFile(path)
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        file.take(NOTED)
    assert len(list(Path("/proc/self/fd").iterdir())) == num_open
    path.write_text("")
    file.take(ENDED)
    assert [line["event"] for line in lines(path)] == ["run_ended"]
    file.close()
