"""The output of every benchmark: a table for people, or with --json one object for machines."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Column, Table


@dataclass(frozen=True)
class Figure:
    """One measured value. target: the required number, None if there is none. met: None without a target."""

    name: str
    value: float
    unit: str
    target: float | None = None
    met: bool | None = None
    note: str = ""


def at_most(name: str, value: float, unit: str, target: float, note: str = "") -> Figure:
    """A figure that must not be above its target."""
    return Figure(name, value, unit, target, value <= target, note)


def at_least(name: str, value: float, unit: str, target: float, note: str = "") -> Figure:
    """A figure that must not be below its target."""
    return Figure(name, value, unit, target, value >= target, note)


def machine() -> dict[str, str | int | float]:
    """The machine that the figures were measured on."""
    with open("/proc/cpuinfo") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count() or 0,
        "memory_gib": round(memory, 1),
        "accelerator": str(accelerator) if accelerator else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def commit() -> str:
    """The measured commit, marked ``-dirty`` if the tree has changes."""
    described = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    return described.stdout.strip() or "unknown"


def emit(benchmark: str, figures: Sequence[Figure], as_json: bool) -> None:
    """Print the figures."""
    if as_json:
        report = {"benchmark": benchmark, "commit": commit(), "machine": machine()}
        print(json.dumps({**report, "figures": [asdict(figure) for figure in figures]}))
        return
    table = Table(
        Column("figure", overflow="fold"), "value", "unit", "target", "met", "note", title=f"{benchmark} ({commit()})"
    )
    for figure in figures:
        met = "-" if figure.met is None else "yes" if figure.met else "no"
        target = "-" if figure.target is None else f"{figure.target:g}"
        table.add_row(figure.name, f"{figure.value:.4g}", figure.unit, target, met, figure.note)
    Console().print(table)
