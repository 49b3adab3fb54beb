from __future__ import annotations

import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from flowtrain.config.load import load_config, override_config
from flowtrain.config.run import RunConfig
from flowtrain.errors import ConfigError
from flowtrain.observability.run_dir import RunDir, check_run_dir, held_run_dir, open_run_dir, run_dir

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load_config(QUICKSTART, [f"runs_dir={tmp_path / 'runs'}"])


def test_a_new_run_gets_a_private_directory_with_its_configuration(config: RunConfig, tmp_path: Path) -> None:
    run = open_run_dir(config, resume=False)
    assert run == run_dir(config) == RunDir(tmp_path / "runs" / "quickstart")
    assert stat.S_IMODE(run.root.stat().st_mode) == 0o700
    assert stat.S_IMODE(run.config.stat().st_mode) == 0o600
    assert run.load_config() == config
    run.write_plan({"schema": 1, "encoders": {"vision": {"num_cpus": 0.5}}})
    assert run.plan.read_text() == "schema: 1\nencoders:\n  vision:\n    num_cpus: 0.5\n"


def test_a_run_that_is_there_is_refused_with_the_ways_out(config: RunConfig) -> None:
    root = open_run_dir(config, resume=False).root
    before = (root / "config.yaml").stat().st_mtime_ns
    with pytest.raises(ConfigError) as caught:
        open_run_dir(config, resume=False)
    assert str(caught.value) == (
        f"{root} already holds a run; continue it with --resume, give this run another name (name=quickstart-2), "
        "or remove the directory"
    )
    assert (root / "config.yaml").stat().st_mtime_ns == before


def test_an_empty_directory_may_be_used(config: RunConfig) -> None:
    run_dir(config).root.mkdir(parents=True)
    assert open_run_dir(config, resume=False).config.is_file()


def test_a_resume_takes_what_may_change_and_refuses_the_rest(config: RunConfig) -> None:
    run = open_run_dir(config, resume=False)
    longer = override_config(config, ["training.max_steps=500"])
    assert open_run_dir(longer, resume=True) == run
    assert run.load_config() == longer
    with pytest.raises(ConfigError, match=r"seed was 0, is now 1"):
        open_run_dir(override_config(longer, ["seed=1"]), resume=True)
    assert run.load_config() == longer


def test_a_run_of_an_earlier_version_goes_on_row_by_row(config: RunConfig) -> None:
    """Its shuffle: true meant what rows means today, and its JSON was of the format llava."""
    formats = ["data.sources.0.format=json", "data.eval.format=json"]
    run = open_run_dir(override_config(config, formats), resume=False)
    text = run.config.read_text()
    assert text.count("shuffle: blocks") == 1 and text.count("format: json") == 2
    run.config.write_text(text.replace("shuffle: blocks", "shuffle: true").replace("format: json", "format: llava"))
    with pytest.raises(ConfigError, match=r"data\.shuffle was 'rows', is now 'blocks'$"):
        open_run_dir(override_config(config, formats), resume=True)
    rows = override_config(config, [*formats, "data.shuffle=rows"])
    assert open_run_dir(rows, resume=True).load_config() == rows


def test_a_run_of_an_earlier_version_keeps_the_steps_of_its_trace(config: RunConfig) -> None:
    run = open_run_dir(config, resume=False)
    text = run.config.read_text()
    assert "  trace:\n    steps: 100\n" in text
    run.config.write_text(text.replace("  trace:\n    steps: 100\n", "  trace_steps: 7\n"))
    assert run.load_config().observability.trace.steps == 7
    with pytest.raises(ConfigError, match=r"trace_steps = 7: this key is called observability.trace.steps now"):
        load_config(QUICKSTART, ["observability.trace_steps=7"])


def test_a_tensor_parallel_run_of_an_earlier_version_had_whole_norms(config: RunConfig) -> None:
    """A resume splits them by tokens and says so; without tensor parallelism there is nothing to say."""
    for tp, then in ((1, True), (2, False)):
        split = override_config(config, [f"name=tp{tp}", f"backbone.tensor_parallel_size={tp}"])
        run = open_run_dir(split, resume=False)
        text = run.config.read_text()
        assert text.count("  sequence_parallel: true\n") == 1
        run.config.write_text(text.replace("  sequence_parallel: true\n", ""))
        assert run.load_config().backbone.sequence_parallel is then
        open_run_dir(split, resume=True)


def test_a_resume_of_what_was_not_begun_begins_it(config: RunConfig) -> None:
    assert open_run_dir(config, resume=True).load_config() == config


def test_a_file_in_the_way_and_a_directory_that_is_no_run(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "quickstart").touch()
    with pytest.raises(ConfigError, match=r"quickstart is a file; the run's directory goes there"):
        open_run_dir(config, resume=True)
    within = config.model_copy(update={"runs_dir": str(tmp_path / "runs" / "quickstart" / "deep")})
    with pytest.raises(ConfigError, match=r"runs_dir \(.*deep\): no directory can be created in .*quickstart; choose"):
        check_run_dir(within, resume=False)
    with pytest.raises(ConfigError, match=r"not a run's directory \(it has no config.yaml\)"):
        RunDir(tmp_path).load_config()


def test_a_run_belongs_to_one_process_at_a_time(config: RunConfig) -> None:
    with held_run_dir(config):
        run = open_run_dir(config, resume=False)
        with pytest.raises(ConfigError, match="another process is training this run"), held_run_dir(config):
            pass
    with held_run_dir(config):
        assert open_run_dir(config, resume=True) == run


def test_a_killed_process_holds_no_run(config: RunConfig) -> None:
    source = f"""
import os, signal
from flowtrain.config.load import load_config
from flowtrain.observability.run_dir import held_run_dir
with held_run_dir(load_config({str(QUICKSTART)!r}, ["runs_dir={config.runs_dir}"])):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", source], check=False).returncode == -signal.SIGKILL
    with held_run_dir(config):
        assert open_run_dir(config, resume=False).config.is_file()
