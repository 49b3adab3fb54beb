"""The command that ``flowtrain plan`` prints last starts exactly the plan that it saves."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

import flowtrain
from flowtrain import api
from flowtrain.allocator.plan import read_plan
from flowtrain.cli.app import app
from flowtrain.config.load import override_config
from flowtrain.controller.planning.planned import planned_model
from flowtrain.types.run_plan import Mode
from tests.profiles import write_cpu_profile

REPOSITORY = Path(__file__).parents[2]
QUICKSTART = str(REPOSITORY / "configs" / "quickstart.yaml")
MODELS_6B = str(REPOSITORY / "configs" / "models" / "vlm_6b.yaml")
MODES = (*get_args(Mode), "auto")
CHOICES = ((), ("allocator.choose=[microbatch_tokens, activation_checkpointing]",), ("allocator.choose=[]",))


def overrides_of(line: str) -> list[str]:
    """The overrides of a printed ``flowtrain train CONFIG``, as a shell would pass them."""
    words = shlex.split(line)
    return words[words.index("train") + 2 :]


def printed(tmp_path: Path, *arguments: str) -> tuple[list[str], Any, str]:
    """The overrides that a plan prints, the plan that the same command saves, and all that is printed."""
    saved = tmp_path / "plan.yaml"
    runner = CliRunner(env={"COLUMNS": "100"})
    shown = runner.invoke(app, ["plan", *arguments])
    assert (shown.exit_code, shown.stderr) == (0, ""), shown.stderr
    assert runner.invoke(app, ["plan", *arguments, "--save", str(saved)]).exit_code == 0
    return overrides_of(shown.stdout.splitlines()[-1]), read_plan(saved), shown.stdout


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("choose", CHOICES, ids=["default", "some", "none"])
def test_the_printed_line_of_a_run_is_the_plan_that_is_saved(mode: str, choose: tuple[str, ...], tmp_path: Path) -> None:
    profile = str(write_cpu_profile(tmp_path / "profile.json", api.resolve(QUICKSTART)))
    asked = [f"mode={mode}", "backbone.data_parallel_size=4", *choose]
    overrides, saved, _ = printed(tmp_path, QUICKSTART, *asked, "--devices", "2", "--profile", profile)
    planned = api.resolve(QUICKSTART, asked)
    assert api.resolve(QUICKSTART, overrides) == planned.with_plan(saved)
    report = flowtrain.plan(QUICKSTART, asked, devices=2, profile=profile)
    assert override_config(planned, report.overrides) == planned.with_plan(report.plan)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("choose", CHOICES[:2], ids=["default", "some"])
def test_the_printed_line_of_a_model_file_sets_all_that_its_plan_sets(
    mode: str, choose: tuple[str, ...], tmp_path: Path
) -> None:
    asked = [f"mode={mode}", *choose]
    overrides, saved, shown = printed(tmp_path, MODELS_6B, *asked, "--devices", "16")
    planned = planned_model(MODELS_6B, asked).config
    assert override_config(planned, overrides, check_paths=False) == planned.with_plan(saved)
    assert "CONFIG is your run's configuration, with this model and your data" in shown
    report = flowtrain.plan(MODELS_6B, asked, devices=16)
    assert override_config(planned, report.overrides, check_paths=False) == planned.with_plan(report.plan)
    other = override_config(planned, ["backbone.num_cpus=3"], check_paths=False)  # what a user's run may have
    assert override_config(other, report.overrides, check_paths=False) == other.with_plan(report.plan)
