"""``flowtrain simulate --html``: one page about the simulated modes, with a picture of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from markupsafe import Markup

from flowtrain.allocator.mode_reasons import rate_text
from flowtrain.cli.mode_tables import plan_text
from flowtrain.cli.tables import nbytes_text
from flowtrain.controller.simulation import SimulatedMode, SimulationReport
from flowtrain.observability.report.blocks import Cell, Section, gantt_figure, number_cell, table
from flowtrain.observability.report.gantt import Work, step_picture
from flowtrain.observability.report.page import page
from flowtrain.simulator.gantt import BACKWARD, FORWARD, STARVED, rank_spans

_NAMES = {FORWARD: "forward", BACKWARD: "backward", STARVED: "fetch"}
"""What a rank does, as a run's own timeline names it."""
_NOTE = (
    "fetch: a rank waits for data; in gaps it waits for other ranks. --trace writes every replica, for ui.perfetto.dev."
)
_HOVER = "Over a bar, the pointer shows its microbatch and time."


def simulation_page(report: SimulationReport, name: str, facts: Sequence[tuple[str, str]], now: float) -> str:
    """Return the page as text.

    name: of what was simulated. facts: what else the command shows. now: in seconds since the Unix epoch.
    """
    first = report.modes[0]
    picture = step_picture(list(_work(first)), len(first.run.steps))
    sections = [
        Section("modes", "Modes", _modes(report)),
        Section("step", f"A step of {first.rating.mode}", gantt_figure(picture, "step-gantt", _NOTE)),
        Section("memory", "Memory", _memory(first)),
        Section("facts", "Conditions", table("What was simulated", ("", ""), facts)),
    ]
    lead = f"{first.rating.mode}: {rate_text(first.rate)} samples/s in virtual time, {first.step_s:.4g} s a step"
    return page(f"{name}: FlowTrain simulation", "FlowTrain simulation", name, lead, sections, now, _HOVER)


def _work(mode: SimulatedMode) -> Iterator[Work]:
    """What the ranks of the first replica do in the last step."""
    timeline = mode.run.last
    pp = timeline.program.num_ranks // timeline.program.num_replicas
    for rank in range(pp):
        for sign, microbatch, start_s, end_s in rank_spans(timeline, rank):
            name = f"rank {rank}"
            yield Work(name, name, name, _NAMES[sign], start_s, end_s, {"microbatch": microbatch})


def _modes(report: SimulationReport) -> Markup:
    headings = ("mode", "degrees, settings", "samples/s", "by formula", "tokens/s", "step, s", "MFU")
    rows: list[list[Cell | str]] = []
    for mode in report.modes:
        assert mode.rating.rate_formula is not None
        numbers = (
            rate_text(mode.rate),
            rate_text(mode.rating.rate_formula),
            f"{mode.tokens_per_s:,.0f}",
            f"{mode.step_s:.4g}",
            f"{mode.mfu:.1%}",
            f"{mode.run.starved:.1%}",
            f"{mode.run.bubble:.1%}",
        )
        degrees = plan_text(mode.rating).replace("\n", "; ")
        rows.append([mode.rating.mode, degrees, *map(number_cell, numbers), mode.limited_by])
    return table("Times of each mode", (*headings, "starved", "bubble", "limited by"), rows)


def _memory(mode: SimulatedMode) -> Markup:
    kinds = [kind for kind in mode.rank_memory[0] if any(rank[kind] for rank in mode.rank_memory)]
    rows: list[list[Cell | str]] = []
    for number, rank in enumerate(mode.rank_memory):
        counts = [sum(rank.values()), *(rank[kind] for kind in kinds)]
        rows.append([f"rank {number}", *(number_cell(nbytes_text(count)) for count in counts)])
    headings = ("rank", "all", *(kind.replace("_", " ") for kind in kinds))
    return table("What each pipeline rank holds at its fullest moment", headings, rows)
