"""``flowtrain train``: shows what would run, or what mode a plan chose and how the run ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from flowtrain import api
from flowtrain.cli.exit_codes import EXIT_INTERRUPTED
from flowtrain.cli.mode_tables import choice_tables
from flowtrain.cli.plain_text import one_line
from flowtrain.cli.tables import memory_table, plan_tables, resume_table, summary_table

if TYPE_CHECKING:
    from flowtrain.config.run import RunConfig
    from flowtrain.controller.planning.report import PlanReport
    from flowtrain.controller.summary import RunSummary

_MAX_WARNING = 2000


def train(config: Path, overrides: Sequence[str], resume: bool, plan: Path | None, devices: int | None) -> RunSummary:
    """Train as ``api.train`` does, and show the plan that ``mode: auto`` starts and how the run ended."""
    summary = api.train(
        config, overrides, resume, plan=plan, devices=devices, planned=_show_choice, loading=_loading_shown
    )
    Console().print(summary_table(summary), soft_wrap=True)
    return summary


def show_dry_run(config: Path, overrides: Sequence[str], resume: bool, plan: Path | None, devices: int | None) -> None:
    """Show what ``train`` with the same arguments would do."""
    report = api.dry_run(config, overrides, resume, plan=plan, devices=devices)
    if report.planning is not None:
        _show_choice(report.planning)
    resumption = report.resumption
    tables = [] if report.memory is None else [memory_table(report.run, report.memory)]
    tables += [] if resumption is None else [resume_table(resumption, report.run.num_steps)]
    resumes = resumption is not None and resumption.step is not None
    console = Console()
    console.print(*plan_tables(report.run, report.image_tokens, resumes), *tables, sep="\n")
    for warning in report.warnings:
        text = one_line(f"warning: {warning}", _MAX_WARNING, console.encoding)  # it quotes the data
        console.print(text, style="yellow", markup=False, highlight=False)


def _show_choice(report: PlanReport) -> None:
    Console().print(*choice_tables(report), sep="\n")


@contextmanager
def _loading_shown(config: RunConfig) -> Iterator[None]:
    from flowtrain.observability.progress import ProgressDisplay

    with ProgressDisplay(config.observability.progress) as display, _interrupt_exits_at_once():
        display.phase("loading libraries")
        yield


@contextmanager
def _interrupt_exits_at_once() -> Iterator[None]:
    """Exit at once on Ctrl-C: the import of libraries can swallow a KeyboardInterrupt, and nothing needs cleanup."""
    previous = signal.signal(signal.SIGINT, lambda number, frame: os._exit(EXIT_INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
