"""The report at the end of a run."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from flowtrain.config.load import dump_resolved, load_config, override_config
from flowtrain.config.run import RunConfig
from flowtrain.controller.run_report import report_at_end
from flowtrain.errors import ConfigError, WorkerLostError
from flowtrain.observability.run_dir import RunDir, held_run_dir
from flowtrain.training import checkpoint_store
from tests.report.runs import write_run

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """Of a run whose files are there."""
    config = load_config(QUICKSTART, [f"runs_dir={tmp_path}", "observability.report_thumbnails=false"])
    directory = write_run(tmp_path, "quickstart", num_steps=20)
    (directory / "config.yaml").write_text(dump_resolved(config))
    return config


def write_checkpoint(checkpoints: Path, step: int) -> None:
    temporary = checkpoint_store.temporary_directory(checkpoints, step, "nonce")
    temporary.mkdir(parents=True)
    meta = checkpoint_store.CheckpointMeta(step, {}, "digest", 1, 1, "torch")
    checkpoint_store.commit(temporary, meta, keep=10)


def test_a_run_that_ends_well_or_badly_gets_its_report(config: RunConfig, tmp_path: Path) -> None:
    report = tmp_path / "quickstart" / "report.html"
    with report_at_end(config) as ending:
        assert not report.exists()
        ending.planning = {"tokens_per_s": 1000.0, "where": Path("x")}
    assert "Plan and reality" in report.read_text()
    assert json.loads((report.parent / "planning.json").read_text()) == {"tokens_per_s": 1000.0, "where": "x"}
    report.unlink()
    with pytest.raises(WorkerLostError, match="it died"), report_at_end(config):
        raise WorkerLostError("it died")
    assert report.is_file()


def test_an_error_names_the_report_or_the_directory(config: RunConfig, tmp_path: Path) -> None:
    directory = tmp_path / "quickstart"
    errors: tuple[Exception, ...] = (WorkerLostError("it died"), ConfigError("an actor cannot build the model"))
    for each, note in (
        (config, f"the report of the run: {directory / 'report.html'}"),
        (override_config(config, ["observability.report=false"]), f"the run is in {directory}"),
    ):
        for error in errors:
            with pytest.raises(type(error)) as caught, report_at_end(each):
                RunDir(directory).write_plan({"mode": "decoupled"})  # as a start does that opens the directory
                raise error
            assert caught.value.__notes__.pop() == note


def test_an_error_before_the_directory_is_opened_has_nothing_to_read(config: RunConfig) -> None:
    for name, error in (("quickstart", ConfigError("refused")), ("other", WorkerLostError("it died"))):
        with pytest.raises(type(error)), report_at_end(override_config(config, [f"name={name}"])):
            raise error
        assert not hasattr(error, "__notes__")


def test_an_interrupt_says_what_is_lost_and_how_to_get_the_report(config: RunConfig, tmp_path: Path) -> None:
    directory = tmp_path / "quickstart"
    command = f"flowtrain train {directory}/config.yaml --resume"
    for checkpoint, text in (
        (None, f"there is no checkpoint, so {command} begins anew; steps 1 to 20 are lost"),
        (12, f"{command} goes on after step 12; steps 13 to 20 are lost"),
    ):
        if checkpoint is not None:
            write_checkpoint(directory / "checkpoints", checkpoint)
        with pytest.raises(KeyboardInterrupt) as caught, report_at_end(config):
            raise KeyboardInterrupt
        assert caught.value.__notes__ == [f"{directory}: {text}", f"flowtrain report {directory} writes its report"]
    with pytest.raises(KeyboardInterrupt) as caught, report_at_end(override_config(config, ["name=other"])):
        raise KeyboardInterrupt
    assert not hasattr(caught.value, "__notes__"), "the run had not begun"


def test_an_interrupt_of_a_run_on_emulated_devices_names_no_resume(config: RunConfig, tmp_path: Path) -> None:
    model = config.model.model_copy(update={"device": "emulated"})
    with pytest.raises(KeyboardInterrupt) as caught, report_at_end(config.model_copy(update={"model": model})):
        raise KeyboardInterrupt
    assert caught.value.__notes__ == [f"flowtrain report {tmp_path / 'quickstart'} writes its report"]


def test_nothing_is_written_if_it_is_off_or_interrupted(config: RunConfig, tmp_path: Path) -> None:
    off = override_config(config, ["observability.report=false"])
    with report_at_end(off):
        pass
    with pytest.raises(KeyboardInterrupt), report_at_end(config):
        raise KeyboardInterrupt
    with held_run_dir(config), report_at_end(config):  # another run trains there
        pass
    assert not (tmp_path / "quickstart" / "report.html").exists()


def test_a_run_that_was_refused_leaves_no_directory(config: RunConfig, tmp_path: Path) -> None:
    with report_at_end(override_config(config, ["name=other"])):
        pass
    assert not (tmp_path / "other").exists()


def test_a_report_that_fails_does_not_change_how_the_run_ended(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object) -> str:
        raise ZeroDivisionError("a fault of the page")

    monkeypatch.setattr("flowtrain.controller.run_report.build_report", broken)
    with caplog.at_level(logging.WARNING), report_at_end(config):
        pass
    directory = tmp_path / "quickstart"
    assert caplog.messages == [f"report.html is missing: a fault of the page; flowtrain report {directory} writes it"]
    with pytest.raises(WorkerLostError), report_at_end(config):
        raise WorkerLostError("it died")


def test_a_full_disk_costs_the_report_alone(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("flowtrain.controller.run_report.replace_text", full)
    with caplog.at_level(logging.WARNING), report_at_end(config):
        pass
    assert len(caplog.messages) == 1 and "No space left on device" in caplog.messages[0]
