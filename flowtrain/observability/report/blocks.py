"""Pieces of a page that several sections use: sections, tables, tiles, figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from flowtrain.observability.report.chart_svg import draw_chart
from flowtrain.observability.report.figures import NUM_COLORS, Chart, Line
from flowtrain.observability.report.gantt import Gantt
from flowtrain.observability.report.gantt_svg import draw_gantt, kind_of, kinds_in, steps_text
from flowtrain.observability.report.markup import Content, element
from flowtrain.observability.report.units import duration, scaled

MAX_TEXT = 1500
"""Characters of one text from data that a page shows."""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page with a heading."""

    key: str
    """Unique in a page; letters, digits and hyphens."""
    title: str
    content: Markup


@dataclass(frozen=True, slots=True)
class Tile:
    """A number that the first screen shows."""

    name: str
    value: str
    sub: str = ""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table."""

    content: Content
    is_number: bool = False
    is_text: bool = False
    """Text from data, as long as it may be."""
    tone: str = ""
    """``better``, ``worse``, or ``when`` for a time."""


def number_cell(text: str, tone: str = "") -> Cell:
    """Return a cell that is aligned to the right."""
    return Cell(text, is_number=True, tone=tone)


def text_cell(text: str) -> Cell:
    """Return a cell with text from data."""
    return Cell(cut(text), is_text=True)


def cut(text: str, limit: int = MAX_TEXT) -> str:
    """Return a text with at most ``limit`` characters, and how many more there are."""
    return text if len(text) <= limit else f"{text[:limit]} \u2026 {len(text) - limit:,} more characters"


def tiles(shown: Iterable[Tile]) -> Markup:
    """Return tiles as a list of names and values."""
    return element(
        "dl",
        [
            element(
                "div",
                element("dt", tile.name),
                element("dd", tile.value, class_="value"),
                element("dd", tile.sub, class_="sub") if tile.sub else None,
                class_="tile",
            )
            for tile in shown
        ],
        class_="tiles",
    )


def table(caption: str, headings: Sequence[str], rows: Iterable[Sequence[Cell | str]]) -> Markup:
    """Return a table that scrolls on its own where it is too wide; a row's first cell is its heading."""
    body = [[each if isinstance(each, Cell) else Cell(each) for each in row] for row in rows]
    right = {place for row in body for place, cell in enumerate(row) if cell.is_number}
    head = [
        element("th", heading, scope="col", class_="number" if place in right else None)
        for place, heading in enumerate(headings)
    ]
    lines = [element("tr", [_cell(cell, place) for place, cell in enumerate(row)]) for row in body]
    found = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", head)),
        element("tbody", lines),
    )
    return element("div", scroll(found, caption), class_="panel")


def scroll(content: Markup, label: str) -> Markup:
    """Return content that scrolls sideways, also by the keyboard."""
    return element("div", content, class_="scroll", role="group", aria_label=label, tabindex=0)


def _cell(cell: Cell, place: int) -> Markup:
    names = [cell.tone, "number" if cell.is_number else "", "text" if cell.is_text else ""]
    class_ = " ".join(name for name in names if name) or None
    if place == 0:
        return element("th", cell.content, scope="row", class_=class_)
    return element("td", cell.content, class_=class_)


def charts(shown: Iterable[Chart], x_name: str = "step") -> Markup | None:
    """Return charts side by side; None if there are none."""
    drawn = [chart for chart in shown if any(np.isfinite(line.y).any() for line in chart.lines)]
    found = [chart_figure(chart, x_name) for chart in drawn]
    if not found:
        return None
    num_small = sum(not chart.is_tall for chart in drawn)
    in_pairs = num_small == 2 or num_small % 3 == 1  # so that rows are full
    return element("div", found, class_="charts pairs" if in_pairs else "charts")


def chart_figure(chart: Chart, x_name: str = "step") -> Markup | None:
    """Return a chart with its heading, last value, legend and note; None if it has no value."""
    picture = draw_chart(chart, x_name)
    if not picture:
        return None
    named = [line for line in chart.lines if not line.is_faint]
    now = ""
    if len(named) == 1:
        values = chart.values_of(named[0]).y
        known = values[np.isfinite(values)]
        now = f"last {scaled(float(known[-1]), chart.kind, chart.unit)}"
    return element(
        "figure",
        element("figcaption", element("h3", chart.title), element("span", now, class_="now") if now else None),
        picture,
        _legend(named) if len(named) > 1 else None,
        element("p", chart.note, class_="note") if chart.note else None,
        class_="wide" if chart.is_tall else None,
    )


def _legend(lines: Sequence[Line]) -> Markup:
    return element(
        "ul",
        [
            element(
                "li",
                element("span", class_=f"swatch c{line.color % NUM_COLORS} {line.form}", aria_hidden="true"),
                element("span", cut(line.label, 80)),
            )
            for line in lines
        ],
        class_="legend",
    )


def gantt_figure(gantt: Gantt, key: str, note: str = "All spans are in trace.json, for ui.perfetto.dev.") -> Markup:
    """Return a picture of steps with its heading, legend and note."""
    title = steps_text(gantt)
    legend = element(
        "ul",
        [
            element(
                "li",
                element("span", class_=f"swatch block k-{kind_of(kind)}", aria_hidden="true"),
                element("span", kind),
            )
            for kind in kinds_in(gantt)
        ],
        class_="legend",
    )
    left_out = f"{gantt.num_left_out:,} more actors are not shown. " if gantt.num_left_out else ""
    return element(
        "figure",
        element("figcaption", element("h3", title), element("span", duration(gantt.duration_s), class_="now")),
        scroll(draw_gantt(gantt, key), f"{title}, picture"),
        legend,
        element("p", f"{left_out}{note}", class_="note"),
        class_="wide",
    )
