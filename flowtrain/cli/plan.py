"""``flowtrain plan``: shows the degrees that the allocator chooses and why, saves the plan, draws the rates."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from flowtrain import api
from flowtrain.allocator.plan import plan_overrides, to_yaml
from flowtrain.allocator.program.solvers import SolverName
from flowtrain.cli.output_path import check_output_path, check_plot_path
from flowtrain.cli.plan_tables import plan_report_tables
from flowtrain.config.yaml_text import dotted
from flowtrain.controller.planning.planned import assumed_settings, is_model_file
from flowtrain.controller.planning.report import PlanReport
from flowtrain.errors import ConfigError

PLOT_ENDINGS = (".png", ".svg")


def plan(
    config: Path,
    overrides: Sequence[str],
    asked: dict[str, Any],
    solver: str,
    as_json: bool,
    save: Path | None,
    plot: Path | None,
) -> None:
    """Plan as ``api.plan`` does, save, show and draw it; raises ConfigError.

    asked: devices and profile, as keyword arguments of ``api.plan``. Plot errors are raised last.
    """
    if plot is not None:
        check_plot_path(plot, PLOT_ENDINGS)
    if save is not None:
        check_output_path("--save", save)
    # ``api.plan`` refuses an unknown solver with its name, like one that is not installed.
    report = api.plan(config, overrides, solver=cast(SolverName, solver), **asked)
    if save is not None:
        _save(report, save)
    if as_json:
        print(json.dumps(report.as_record(), allow_nan=False))
    else:
        Console().print(*plan_report_tables(report), sep="\n")
        saved = "saved; " if save is not None else ""
        print(f"\n{saved}{'first fix what the notes name, then ' if report.faults else ''}start it with")
        if is_model_file(config):
            print("(CONFIG is your run's configuration, with this model and your data)")
        print(_start(config, overrides, report, save))  # a line that can be copied, however long
    if plot is not None:
        _draw(report, plot)
        print(f"plot: {plot}", file=sys.stderr)


def _start(config: Path, overrides: Sequence[str], report: PlanReport, saved: Path | None) -> str:
    """The command that trains with the plan: what the plan sets stands in the place of overrides of its keys.

    saved: the file of the plan; None: overrides set it. Without ``RAY_ADDRESS`` a run has this machine alone, so a plan
    for several nodes names its cluster.
    """
    if is_model_file(config):
        overrides = [*assumed_settings(report.planned.config), *overrides]
    decided = {dotted(key) for key in report.plan.settings()}
    sections = {dotted(key[:length]) for key in report.plan.settings() for length in range(1, len(key))}
    keys = {text: text.partition("=")[0].strip() for text in overrides}
    others = [text for text, key in keys.items() if key not in decided]
    if sections & set(keys.values()):  # an override of a whole section would undo the plan's part of it
        others += plan_overrides(report.plan)
    elif saved is None:
        others += report.overrides_with(decided & set(keys.values()))
    command = ["flowtrain", "train", "CONFIG" if is_model_file(config) else str(config), *others]
    command += [] if saved is None else ["--plan", str(saved)]
    address = shlex.quote(os.environ.get("RAY_ADDRESS") or "auto")
    return f"RAY_ADDRESS={address} {shlex.join(command)}" if report.num_nodes > 1 else shlex.join(command)


def _save(report: PlanReport, path: Path) -> None:
    try:
        path.write_text(to_yaml(report.plan), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--save {path}: the plan cannot be written: {error.strerror}") from error


def _draw(report: PlanReport, path: Path) -> None:
    from flowtrain.cli.plan_plot import has_splits_to_draw, write_plot

    if not has_splits_to_draw(report) and len(report.comparison.ratings) == 1:
        raise ConfigError(
            f"--plot {path}: there is no choice of splits to draw; a plot needs at least two, on one type of devices, "
            "or mode=auto"
        )
    write_plot(report, path)
