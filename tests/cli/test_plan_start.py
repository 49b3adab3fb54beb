"""The command that ``flowtrain plan`` prints last starts exactly the plan that it saves."""

from __future__ import annotations

import shlex
from dataclasses import replace
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
def test_the_printed_line_of_a_run_is_the_plan_that_is_saved(
    mode: str, choose: tuple[str, ...], tmp_path: Path
) -> None:
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


def shown_by(*arguments: str) -> str:
    return " ".join(CliRunner(env={"COLUMNS": "200"}).invoke(app, ["plan", *arguments]).output.split())


def test_devices_that_nobody_gave_are_named_as_such(tmp_path: Path) -> None:
    shown = shown_by(QUICKSTART)
    assert "devices 3 h200, from the configuration's degrees (give --devices), 8 a node" in shown
    assert "h200 is the default, not this machine: give --device, or --profile for measured rates" in shown
    profile = str(write_cpu_profile(tmp_path / "profile.json", api.resolve(QUICKSTART)))
    for given in (("--devices", "2", "--device", "h200"), ("--profile", profile, "--nodes", "1")):
        shown = shown_by(QUICKSTART, *given)
        assert "(give --devices)" not in shown and "not this machine" not in shown


@pytest.mark.parametrize(
    ("choose", "said"),
    [
        ((), "only mode 'colocated' was planned, with its settings as configured; allocator.choose=all frees them;"),
        (("allocator.choose=all",), "was planned, and all settings that a plan may choose;"),
        (
            ("allocator.choose=[chunks]",),
            "was planned, and of its settings chunks; allocator.choose=all frees the others;",
        ),
    ],
)
def test_a_plan_of_one_mode_names_what_it_chose(choose: tuple[str, ...], said: str) -> None:
    report = flowtrain.plan(QUICKSTART, ["mode=colocated", *choose], devices=2)
    assert any(said in note for note in report.notes)
    assert (report.plan.backbone_settings is not None) == bool(choose)


def test_where_no_mode_fits_each_has_a_line() -> None:
    result = CliRunner().invoke(app, ["plan", MODELS_6B, "--devices", "1", "--device", "l4"])
    head, *lines = result.stderr.splitlines()
    assert head == "flowtrain: no mode can be planned:"
    assert [line.split(":")[0] for line in lines] == [
        "  mode decoupled and disaggregated",
        "  mode colocated",
        "  mode monolithic",
        "  mode llm_only",
    ]


def test_a_mode_that_cannot_run_is_not_said_to_lack_memory() -> None:
    shown = shown_by(QUICKSTART, "mode=auto", "encoders.vision.trainable=true", "--devices", "2")
    assert "colocated - - - - cannot run" in shown and "the only mode that fits" in shown


@pytest.mark.parametrize(("mode", "word"), [("decoupled", "chosen"), ("auto", "best split")])
def test_the_plot_calls_a_split_chosen_if_its_mode_has_won(mode: str, word: str) -> None:
    from flowtrain.cli.plan_plot import draw

    report = flowtrain.plan(QUICKSTART, [f"mode={mode}"], devices=4)
    assert (report.winner.mode in ("decoupled", "disaggregated")) == (word == "chosen"), "or this test says nothing"
    (text,) = draw(report).axes[-1].texts
    assert text.get_text().startswith(f"{word}: ") and "by packed batches" in text.get_text()


def test_an_mfu_above_its_peak_is_noted() -> None:
    report = flowtrain.plan(QUICKSTART, devices=2)
    assert not any("above 100 %" in note for note in report.notes)
    winner = replace(report.winner, modules=tuple(replace(each, mfu=1.2) for each in report.winner.modules))
    noisy = replace(report, comparison=replace(report.comparison, ratings=(winner,)))
    assert any("MFU above 100 %" in note and "idle machine" in note for note in noisy.notes)
