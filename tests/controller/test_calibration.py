"""A finished run's files become factors of predicted times: twice as long spans, twice the factors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import flowtrain
from flowtrain.cli.app import app
from flowtrain.config.load import dump_resolved, override_config
from flowtrain.config.run import RunConfig
from flowtrain.controller.calibration import CalibrationReport, calibrate_run
from flowtrain.costs.profile import read_profile
from flowtrain.errors import ConfigError
from flowtrain.observability.run_dir import run_dir
from flowtrain.observability.trace import TraceWriter
from flowtrain.types.messages import Span
from tests.e2e.worlds import World, tiny_config

STEPS, STEP_S, MICROBATCHES = 10, 2.0, 3


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    world = World(seed=3)
    world.add_mixed(32)
    return tiny_config(
        tmp_path,
        world.write(tmp_path / "data.parquet"),
        "done",
        model={"device": "emulated", "family": "variable_llava"},
        emulated={"device": "a100", "time_scale": 2.0},
    )


def write_run(
    config: RunConfig, longer: float = 1.0, stall: bool = False, actor: str = "backbone-dp0-pp0-tp0 (emulated)"
) -> Path:
    """Write what a run leaves; longer: factor of all its spans; actor: of the backbone.

    The devices' time is half of this machine's.
    """
    root = run_dir(config).root
    root.mkdir(parents=True, exist_ok=True)
    run_dir(config).config.write_text(dump_resolved(config))
    lines, spans = [], []
    for step in range(STEPS):
        begin = 1000.0 + step * 2 * STEP_S
        lines.append({"timestamp": begin + 2 * STEP_S, "step_time_s": STEP_S, "starved_s": 0.5, "step": step + 1})
        at, tokens = begin + 0.1, 60 + 10 * (step % 3)
        for number in range(MICROBATCHES):
            for name, seconds in (("forward", 0.1), ("backward", 0.2)):
                took = longer * seconds * (20 if stall and step == 5 and number == 1 else 1)
                args: dict[str, int | float | str] = {
                    "microbatch": number,
                    "module": "backbone",
                    "stage": 0,
                    "num_tokens": tokens,
                    "images": 0,
                }
                spans.append(Span(actor, name, at, at + took, args))
                at += took
        spans.append(Span(actor, "optimizer", at, at + longer * 0.02, {"step": step + 1}))
        spans.append(Span("encoder-0 (emulated)", "encode", begin, begin + longer * 0.3, {"images": 4, "unit": step}))
    run_dir(config).metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    writer = TraceWriter(run_dir(config).trace)
    writer.write(spans)
    writer.close()
    return root


def factors(report: CalibrationReport) -> list[float]:
    found = report.calibration
    return [found.backbone, found.encoder("vision"), found.optimizer]


def test_an_update_is_compared_with_that_of_its_own_pipeline_rank(config: RunConfig) -> None:
    split = override_config(config, ["backbone.pipeline_parallel_size=2", "name=split"])
    found = []
    for rank in (0, 1):
        root = write_run(split, actor=f"backbone-dp0-pp{rank}-tp0 (emulated)")
        found.append(calibrate_run(root).calibration.optimizer)
        shutil.rmtree(root)
    assert found[0] != pytest.approx(found[1], rel=0.01), "the last rank has a head, the first one a connector"


def test_factors_are_in_proportion_to_the_spans_and_stalls_do_not_count(config: RunConfig) -> None:
    once = calibrate_run(write_run(config))
    assert all(each > 0.0 for each in factors(once)) and once.num_steps == STEPS - 1
    assert factors(calibrate_run(write_run(config, longer=1.5))) == pytest.approx(
        [1.5 * each for each in factors(once)]
    )
    assert factors(calibrate_run(write_run(config, stall=True)))[0] == pytest.approx(factors(once)[0], rel=0.05)
    # Of 2 s a step the devices compute 0.46 s and wait 0.5 s for data.
    assert once.calibration.step_host_s == pytest.approx(2.0 - 0.5 - (3 * 0.3 + 0.02) / 2.0)


def test_the_command_writes_a_profile_to_plan_with(config: RunConfig, tmp_path: Path) -> None:
    root = write_run(config)
    result = CliRunner().invoke(app, ["calibrate", str(root)])
    assert result.exit_code == 0, result.output
    assert "backbone, measured over predicted" in result.output
    profile = read_profile(run_dir(config).profile)
    assert profile.calibration is not None and profile.calibration.run == "done" and profile.device == "a100"
    emulated = config.model_copy(update={"mode": "llm_only"})
    rates = [
        flowtrain.plan(emulated, devices=2, device="a100", profile=each).rate
        for each in (None, run_dir(config).profile)
    ]
    assert rates[1] < rates[0], "these spans are far longer than an A100's"
    saved = tmp_path / "profile.json"
    again = CliRunner().invoke(app, ["calibrate", str(root), "--save", str(saved)])
    assert again.exit_code == 0 and read_profile(saved).calibration == profile.calibration


def test_what_says_nothing_is_refused(config: RunConfig, tmp_path: Path) -> None:
    root = write_run(config)
    run_dir(config).trace.unlink()
    with pytest.raises(ConfigError, match=r"has no whole step after the first; .* observability.trace.steps=8"):
        calibrate_run(root)
    with pytest.raises(ConfigError, match="no run"):
        flowtrain.calibrate(tmp_path / "nowhere")
    real = config.model_copy(update={"model": config.model.model_copy(update={"device": "cpu"}), "emulated": None})
    with pytest.raises(ConfigError, match=r"run done: no data sheet and no measured times .*--profile FILE"):
        calibrate_run(write_run(real))
