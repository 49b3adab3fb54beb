"""``flowtrain pack``: progress on standard error, figures on standard output, and a plot if asked for."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from flowtrain import api
from flowtrain.cli.output_path import check_plot_path
from flowtrain.cli.pack_tables import pack_tables
from flowtrain.controller.pack import Progress as OnProgress

PLOT_ENDINGS = (".png", ".html")


def pack(
    config: Path,
    overrides: Sequence[str],
    num_steps: int | None,
    compare: bool,
    lengths: Path | None,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Pack as ``api.pack`` does, and show the report; ConfigError before any work if ``plot`` cannot be written."""
    if plot is not None:
        check_plot_path(plot, PLOT_ENDINGS)
    with _progress_bar(shown=sys.stderr.isatty()) as progress:
        report = api.pack(config, overrides, num_steps=num_steps, compare=compare, lengths=lengths, progress=progress)
    if as_json:
        print(json.dumps(report.as_record()))
    else:
        Console().print(*pack_tables(report), sep="\n")
    if plot is not None:
        from flowtrain.cli.pack_plot import write_plot

        write_plot(report, plot)
        print(f"plot: {plot}", file=sys.stderr)


@contextmanager
def _progress_bar(shown: bool) -> Iterator[OnProgress]:
    """Progress on standard error, with one bar for each kind of work."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown) as bar:
        tasks: dict[str, TaskID] = {}

        def update(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield update
