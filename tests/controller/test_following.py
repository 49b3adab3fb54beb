"""Who follows a run: what bad trackers and a full disk leave of its records, and how its end is told."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import flowtrain
from flowtrain.config.load import load_config
from flowtrain.config.run import RunConfig
from flowtrain.controller.following import following, run_started, telling_the_end
from flowtrain.controller.prepare import prepare
from flowtrain.controller.recorder import Recorder
from flowtrain.controller.resume import ResumePoint
from flowtrain.controller.signals import StopRequest
from flowtrain.controller.state import Role
from flowtrain.errors import ConfigError, DataError
from flowtrain.observability import stream as stream_module
from flowtrain.observability import tracker as tracker_module
from flowtrain.observability.callback import Callback
from flowtrain.observability.ledger import read_ledger
from flowtrain.observability.progress import ProgressDisplay
from flowtrain.observability.run_dir import RunDir
from flowtrain.observability.stream import EventStream
from flowtrain.types.run_events import RunEnded, RunStarted, StepFinished
from tests.controller.test_recorder import done, eval_unit, make_prepared, rejected, train_unit
from tests.disk import full_from
from tests.training.ranks import make_config

NUM_STEPS = 10
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def prepared() -> Any:
    run_spec = make_prepared()
    off = run_spec.config.observability.model_copy(update={"ray_metrics": False})
    config: RunConfig = run_spec.config.model_copy(update={"observability": off})
    return run_spec.__class__(**{**vars(run_spec), "config": config})


def run(root: Path, *callbacks: object, each: Callable[[EventStream, Recorder], None] | None = None) -> RunDir:
    """Record a run of ten steps with an evaluation after every other one."""
    root.mkdir()
    files, display = RunDir(root), ProgressDisplay("off", NUM_STEPS)
    started = time.monotonic()
    with (
        following(prepared(), files, ResumePoint(), display, callbacks) as (stream, recorder),
        telling_the_end(stream, recorder, StopRequest(), NUM_STEPS, started),
    ):
        stream.emit(run_started(prepared(), files, ResumePoint(), "cpu", [Role.BACKBONE, Role.ENCODER, Role.ENCODER]))
        for step in range(1, NUM_STEPS + 1):
            recorder.take(done(train_unit(step), loss=1.0 / step))
            if step % 2 == 0:
                recorder.take(done(eval_unit(step), loss=2.0 / step))
            if each is not None:
                each(stream, recorder)
        recorder.take(rejected(5))
        recorder.flush(NUM_STEPS)
    return files


def records(files: RunDir) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` without the time at which they were written."""
    lines = [json.loads(line) for line in files.metrics.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "timestamp"} for line in lines]


def events(files: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in files.events.read_text().splitlines()]


class Raising(Callback):
    """Fails at the third step."""

    def on_step(self, event: StepFinished) -> None:
        if event.step == 3:
            raise RuntimeError("quota exceeded")


class Sleeping(Callback):
    """Would sleep for minutes in every call."""

    def __init__(self, release: threading.Event) -> None:
        self._release = release

    def on_run_start(self, event: RunStarted) -> None:
        self._release.wait(300.0)

    def on_step(self, event: StepFinished) -> None:
        self._release.wait(300.0)


@pytest.fixture
def release() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_a_run_that_is_followed_by_nobody_tells_its_whole_story(tmp_path: Path) -> None:
    files = run(tmp_path / "plain")
    told = events(files)
    assert [line["event"] for line in told] == ["run_started", *["evaluation"] * 5, "quarantined", "run_ended"]
    assert [line["step"] for line in told] == [0, 2, 4, 6, 8, 10, 10, 10]
    start, end = told[0], told[-1]
    assert start["roles"] == {"coordinator": 1, "backbone": 1, "encoder": 2} and start["device"] == "cpu"
    assert set(start["versions"]) == {"flowtrain", "torch", "ray"} and start["resumed_from"] is None
    assert (end["outcome"], end["reason"]) == ("done", None) and end["duration_s"] >= 0.0
    assert [line["eval_loss"] for line in records(files)] == [None, 1.0, None, 0.5, None, 1 / 3, None, 0.25, None, 0.2]


def test_trackers_that_raise_or_sleep_change_no_record(
    tmp_path: Path, release: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stream_module, "FINISH_S", 0.05)
    monkeypatch.setattr(tracker_module, "MAX_WAITING", 4)
    plain = run(tmp_path / "plain")
    followed = run(tmp_path / "followed", Raising(), Sleeping(release))
    assert records(followed) == records(plain)
    assert read_ledger(followed.ledger).equals(read_ledger(plain.ledger))
    assert followed.quarantine.read_text() == plain.quarantine.read_text()
    warned = [line["text"] for line in events(followed) if line["event"] == "note"] + caplog.messages
    assert [sum(f"tracker {name} is off" in line for line in warned) for name in ("Raising", "Sleeping")] == [1, 1]


def test_a_full_disk_that_is_freed_leaves_the_same_records(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain")
    steps = iter(range(1, NUM_STEPS + 1))
    limit = full_from(700)

    def fill_and_free(stream: EventStream, recorder: Recorder) -> None:
        step = next(steps)
        if step == 3:
            limit.__enter__()
        elif step == 7:
            limit.__exit__(None, None, None)

    filled = run(tmp_path / "filled", each=fill_and_free)
    assert records(filled) == records(plain)
    assert read_ledger(filled.ledger).equals(read_ledger(plain.ledger))
    notes = [line["text"] for line in events(filled) if line["event"] == "note"]
    assert any("metrics.jsonl cannot be written" in text for text in notes)
    assert any("metrics.jsonl is written again" in text for text in notes)
    others = [line["event"] for line in events(filled) if line["event"] != "note"]
    assert others == [line["event"] for line in events(plain)]


def test_the_callback_gets_a_configuration_without_secrets(tmp_path: Path) -> None:
    starts: list[RunStarted] = []

    class Mine:
        def on_run_start(self, event: RunStarted) -> None:
            starts.append(event)

    files = run(tmp_path / "mine", Mine())
    (start,) = starts
    assert start.directory == str(files.root) and start.run == "test" and start.num_steps == NUM_STEPS
    assert start.config["data"]["sources"][0]["name"] == "cats"
    assert start.config["observability"]["tracker_options"] == "(hidden)"


def test_callbacks_of_train_follow_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr("flowtrain.controller.run.run_training", lambda config, *_, **named: given.append(named))
    mine = Callback()
    flowtrain.train(QUICKSTART, [f"runs_dir={tmp_path}"], callbacks=[mine])
    assert given == [{"plan": None, "callbacks": [mine]}]


def test_a_tracker_that_is_not_installed_is_refused_before_anything_starts(tmp_path: Path) -> None:
    overrides = [f"runs_dir={tmp_path}", "observability.trackers=[absent.board:Board]"]
    with pytest.raises(ConfigError, match=r"no module absent.board here; put its directory on PYTHONPATH"):
        flowtrain.dry_run(QUICKSTART, overrides)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("start", [flowtrain.train, flowtrain.dry_run])
def test_a_class_that_is_not_in_its_module_is_refused_before_anything_starts(tmp_path: Path, start: Any) -> None:
    overrides = [f"runs_dir={tmp_path}", "observability.trackers=[json:JSONDecoderr]"]
    with pytest.raises(ConfigError, match=r"module json has no JSONDecoderr; did you mean json:JSONDecoder\?"):
        start(QUICKSTART, overrides)
    assert list(tmp_path.iterdir()) == []


def test_a_plan_does_not_import_the_class_of_a_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "boards_never_imported.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    prepare(load_config(QUICKSTART, ["observability.trackers=[boards_never_imported:Board]"]), check_pool=False)


@pytest.mark.parametrize("callbacks", [Callback(), [Callback]])
def test_callbacks_that_cannot_follow_are_refused_before_anything_starts(tmp_path: Path, callbacks: Any) -> None:
    with pytest.raises(ConfigError, match=r"^callbacks"):
        flowtrain.train(QUICKSTART, [f"runs_dir={tmp_path}"], callbacks=callbacks)
    assert list(tmp_path.iterdir()) == []


# --- the end ---------------------------------------------------------------------------------------------------------


def ended(
    tmp_path: Path, error: BaseException | None, last_step: int = NUM_STEPS, stop: StopRequest | None = None
) -> tuple[RunEnded, RunDir]:
    ends: list[RunEnded] = []
    stop = stop or StopRequest()
    tmp_path.joinpath("run").mkdir()
    files, display = RunDir(tmp_path / "run"), ProgressDisplay("off", NUM_STEPS)
    with following(prepared(), files, ResumePoint(), display, ()) as (stream, recorder):
        stream.add(lambda event: ends.append(event) if isinstance(event, RunEnded) else None)
        try:
            with telling_the_end(stream, recorder, stop, NUM_STEPS, time.monotonic()):
                recorder.take(done(train_unit(last_step)))  # held: an evaluation follows
                if error is not None:
                    raise error
        except BaseException as raised:
            assert raised is error
    (end,) = ends
    return end, files


def test_a_part_that_ends_to_grow_says_so_unless_an_end_was_asked_for(tmp_path: Path) -> None:
    stop = StopRequest()
    stop.to_grow = True
    assert ended(tmp_path, None, 4, stop)[0].reason == "it goes on with all its replicas"
    stop.set()
    tmp_path.joinpath("asked").mkdir()
    assert ended(tmp_path / "asked", None, 4, stop)[0].reason == "on request"


@pytest.mark.parametrize(
    ("error", "last_step", "outcome", "reason"),
    [
        (None, NUM_STEPS, "done", None),
        (None, 4, "stopped", "on request"),
        (DataError("no rows"), 4, "failed", "no rows"),
        (ValueError("odd"), 4, "failed", "ValueError: odd"),
        (KeyboardInterrupt(), 4, "stopped", "interrupted"),
    ],
)
def test_how_a_run_ended(
    tmp_path: Path, error: BaseException | None, last_step: int, outcome: str, reason: str | None
) -> None:
    end, files = ended(tmp_path, error, last_step)
    assert (end.outcome, end.reason, end.step) == (outcome, reason, last_step)
    assert events(files)[-1]["event"] == "run_ended"
    assert records(files)[-1]["step"] == last_step, "the held step is told before the end"


def test_a_resumed_run_says_after_which_step() -> None:
    start = ResumePoint(step=4, checkpoint=Path("x"))
    event = run_started(prepared(), RunDir(Path("/runs/a")), start, "cpu", [])
    assert (event.step, event.resumed_from, event.emulated) == (4, 4, False)
    assert make_config().name == event.run
