"""``flowtrain pack``: progress on standard error, figures on standard output, and a plot if asked for."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from flowtrain import api
from flowtrain.cli.output_path import check_plot_path
from flowtrain.cli.pack_tables import pack_tables
from flowtrain.cli.work_progress import work_progress

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
    with work_progress() as progress:
        report = api.pack(config, overrides, num_steps=num_steps, compare=compare, lengths=lengths, progress=progress)
    if as_json:
        print(json.dumps(report.as_record()))
    else:
        Console().print(*pack_tables(report), sep="\n")
    if plot is not None:
        from flowtrain.cli.pack_plot import write_plot

        write_plot(report, plot)
        print(f"plot: {plot}", file=sys.stderr)
