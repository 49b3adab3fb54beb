"""``flowtrain simulate``: what a run would take, mode by mode, with a chart of one step."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from flowtrain import api
from flowtrain.allocator.mode_reasons import rate_text
from flowtrain.cli.mode_tables import plan_text
from flowtrain.cli.output_path import check_output_path
from flowtrain.cli.simulate_page import simulation_page
from flowtrain.cli.tables import facts_table, nbytes_text
from flowtrain.controller.planning.notes import only_mode
from flowtrain.controller.simulation import MOST_ROWS, SimulatedMode, SimulationReport
from flowtrain.errors import ConfigError
from flowtrain.simulator.gantt import BACKWARD, BOTH, FORWARD, STARVED

_NARROWEST = 40


def simulate(
    config: Path,
    overrides: Sequence[str],
    asked: dict[str, Any],
    as_json: bool,
    trace: Path | None,
    html: Path | None,
) -> None:
    """Simulate as ``api.simulate`` does with what was asked, show it, write a trace and a page; raises ConfigError."""
    for option, path, ending in (("--trace", trace, ".json"), ("--html", html, ".html")):
        if path is not None:
            check_output_path(option, path, (ending,))
    report = api.simulate(config, overrides, **asked)
    if trace is not None:
        _write("--trace", trace, json.dumps(report.modes[0].trace()))
    if html is not None:
        _write("--html", html, simulation_page(report, config.stem, _conditions(report), time.time()))
    if as_json:
        print(json.dumps(report.as_record(), allow_nan=False))
        return
    console = Console()
    chart = _chart(report.modes[0], max(console.width - len("rank 00 1023 GiB  ") - 1, _NARROWEST))
    console.print(_modes(report), _flows(report), chart, facts_table(_facts(report)), sep="\n")
    if trace is not None:
        print(f"trace of a step of {report.modes[0].rating.mode}: {trace}", file=sys.stderr)
    if html is not None:
        print(f"page: {html}", file=sys.stderr)


def _modes(report: SimulationReport) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("mode", no_wrap=True)
    table.add_column("degrees, settings", overflow="fold", min_width=13)
    for heading in ("samples\n/s", "by\nformula", "step\ns", "MFU", "starved", "bubble"):
        table.add_column(heading, justify="right", no_wrap=True)
    for mode in report.modes:
        assert mode.rating.rate_formula is not None
        table.add_row(
            mode.rating.mode,
            plan_text(mode.rating),
            rate_text(mode.rate),
            rate_text(mode.rating.rate_formula),
            f"{mode.step_s:.4g}",
            f"{mode.mfu:.1%}",
            f"{mode.run.starved:.1%}",
            f"{mode.run.bubble:.1%}",
        )
    return table


def _flows(report: SimulationReport) -> Table:
    """How the data of each mode flowed."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("flow", no_wrap=True)
    for heading in ("starved\ns", "blocked\ns", "pool\nmean", "pool\npeak", "pool", "look-\nahead", "lost\ns"):
        table.add_column(heading, justify="right", no_wrap=True)
    for mode in report.modes:
        flow = mode.run.flow
        table.add_row(
            mode.rating.mode,
            f"{flow.starved_s:.4g}",
            f"{max(flow.blocked_s.values(), default=0.0):.4g}",
            nbytes_text(round(flow.pool_mean_nbytes)),
            nbytes_text(flow.pool_peak_nbytes),
            nbytes_text(flow.pool_nbytes),
            f"{flow.lookahead:.2g}",
            f"{flow.lost.encode_s:.4g}",
        )
    return table


def _chart(mode: SimulatedMode, width: int) -> Table:
    """The last step of the first replica, a line for each pipeline rank."""
    peaks = [sum(each.values()) for each in mode.rank_memory]
    lines = mode.gantt(width)
    return facts_table([(_rank(rank, peaks[rank]), line) for rank, line in enumerate(lines)])


def _rank(rank: int, peak_nbytes: int) -> str:
    return f"rank {rank} {nbytes_text(peak_nbytes)}"


def _facts(report: SimulationReport) -> list[tuple[str, str]]:
    first = report.modes[0]
    pp = first.partition.pp_size
    shown = f"the first {MOST_ROWS} of {pp} ranks" if pp > MOST_ROWS else f"{pp} ranks" if pp > 1 else "the only rank"
    signs = (
        f"{FORWARD} forward, {BACKWARD} backward, {BOTH} both, {STARVED} waits for data, blank waits for other ranks"
    )
    return [
        ("chart", f"a step of {first.rating.mode}: {shown} of its first replica; {signs}"),
        ("memory", _memory(first)),
        ("fullest ranks", _fullest(report)),
        ("limited by", ", ".join(f"{mode.rating.mode}: {mode.limited_by}" for mode in report.modes)),
        *_conditions(report),
    ]


def _conditions(report: SimulationReport) -> list[tuple[str, str]]:
    first, planning = report.modes[0], report.planning
    rates = "data sheets" if planning.profile is None else planning.profile.source
    devices = ", ".join(f"{each.count} {each.name}" for each in planning.cluster.device_types)
    return [
        ("devices", f"{devices}, times from {rates}"),
        *([("planned", alone)] if (alone := only_mode(planning.planned)) is not None else ()),
        ("simulated", f"{_length(first)}; the second half counts"),
        *_host(report),
        *([("feeders", report.feeding)] if report.feeding is not None else ()),
        *report.not_possible.items(),
        *(("note", note) for note in report.notes),
    ]


def _host(report: SimulationReport) -> list[tuple[str, str]]:
    """What the run's own processes cost each mode; nothing where they have cores of their own."""
    shares = [f"{mode.rating.mode} {1e3 * mode.host_s:.3g} ms" for mode in report.modes if mode.host_s]
    if not shares:
        return []
    return [("host", f"of each step, for the run's own processes on the cores that compute: {', '.join(shares)}")]


def _memory(mode: SimulatedMode) -> str:
    """What the fullest rank holds at its fullest moment."""
    peaks = [sum(each.values()) for each in mode.rank_memory]
    fullest = max(range(len(peaks)), key=lambda rank: peaks[rank])
    held = [(name.replace("_", " "), count) for name, count in mode.rank_memory[fullest].items()]
    parts = ", ".join(f"{name} {nbytes_text(count)}" for name, count in held if count)
    return f"peaks are beside the ranks; the fullest is rank {fullest}: {parts}"


def _length(mode: SimulatedMode) -> str:
    return f"{len(mode.run.steps)} steps of packed batches, of {mode.rating.mode} in {mode.run.ends_s[-1]:.4g} s"


def _fullest(report: SimulationReport) -> str:
    """The highest peak of each mode, and what a process may use."""
    peaks = (
        f"{mode.rating.mode} {nbytes_text(max(sum(rank.values()) for rank in mode.rank_memory))}"
        for mode in report.modes
    )
    backbone = report.modes[0].rating.modules[-1]
    return f"{', '.join(peaks)}; a process may use {nbytes_text(backbone.memory_nbytes)} of a device"


def _write(option: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path}: it cannot be written: {error.strerror}") from error
