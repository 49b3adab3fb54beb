"""``flowtrain trace``: asks a running run for a trace, and shows where it is."""

from __future__ import annotations

from pathlib import Path

import typer

from flowtrain import api
from flowtrain.observability.trace_request import TraceAnswer


def trace(run: Path, steps: int, profiler: bool, memory: bool) -> None:
    """Trace as ``api.trace`` does, and print the files."""
    window = api.trace(run, steps, profiler=profiler, memory=memory, progress=_show_begin)
    typer.echo(f"traced steps {window.first_step} to {window.last_step}")
    for file in window.files:
        typer.echo(str(file))
    if window.note is not None:
        typer.echo(f"flowtrain: {window.note}", err=True)


def _show_begin(answer: TraceAnswer) -> None:
    typer.echo(f"tracing steps {answer.first_step} to {answer.last_step}; Ctrl-C leaves it to the run")
