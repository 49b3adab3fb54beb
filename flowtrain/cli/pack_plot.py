"""The plot of ``flowtrain pack``: a picture (PNG), or a page that holds its tables as well (HTML)."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from flowtrain.cli.pack_tables import CAPTIONS, counted, fact_rows, method_name, method_rows, shown_columns
from flowtrain.controller.pack import PackReport
from flowtrain.scheduler.report import PAPER, MethodReport, StepFigures

CONFIGURED_COLOR, PAPER_COLOR, OTHER_COLOR = "#1668a8", "#c4570a", "#6f767f"
VISION_COLOR, TOKENS_COLOR = "#7b3fa0", "#2d8a5b"
STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "svg.fonttype": "path",
    "svg.hashsalt": "pack",
}
WIDTH_INCHES, DPI = 13.0, 130


@dataclass(frozen=True)
class Panel:
    """One figure of all methods."""

    title: str
    of_step: Callable[[StepFigures], Iterable[float]]
    """Its values in a step."""
    center: Callable[[MethodReport], float]
    """The value that the dot shows."""
    scale: str = "symlog"
    """Scale of its axis."""
    of_ranks: bool = True
    """It compares ranks, so it is left out for a single rank."""
    of_simulated: bool = False
    """It needs simulated steps."""


PANELS = (
    Panel(
        "Fill: share of the capacity, %",
        lambda step: (100 * step.fill,),
        lambda report: 100 * report.fill,
        scale="linear",
        of_ranks=False,
    ),
    Panel(
        "Imbalance of ranks in a step, %",
        lambda step: (100 * step.step_imbalance,),
        lambda report: 100 * report.step_imbalance.median,
    ),
    Panel(
        "Imbalance of ranks in a slot, %",
        lambda step: (100 * value for value in step.slot_imbalances),
        lambda report: 100 * report.slot_imbalance.median,
    ),
    Panel(
        "A step's cost over its lower bound, %",
        lambda step: (100 * step.excess,),
        lambda report: 100 * report.excess.median,
    ),
    Panel(
        "Planning time of a step, ms",
        lambda step: (1e3 * step.plan_time_s,),
        lambda report: 1e3 * report.plan_time_s.median,
        scale="log",
        of_ranks=False,
    ),
    Panel(
        "Simulated step, ms (dot: mean)",
        lambda step: (1e3 * (step.simulated_s or 0.0),),
        lambda report: 1e3 * (report.simulated_s or 0.0),
        scale="linear",
        of_ranks=False,
        of_simulated=True,
    ),
)


def write_plot(report: PackReport, path: Path) -> None:
    """Draw the report into ``path``, a picture or a page by its ending."""
    with matplotlib.rc_context(STYLE):
        figure = draw(report)
        if path.suffix.lower() == ".png":
            figure.savefig(path, dpi=DPI)
        else:
            path.write_text(_page(report, _svg(figure)), encoding="utf-8")


def draw(report: PackReport) -> Figure:
    """Return the figure: the lengths of samples, then one panel per figure with a row for each method."""
    drawings = _drawings(report)
    num_columns = min(3, len(drawings))
    num_rows, rows_inches = -(-len(drawings) // num_columns), 0.26 * len(report.methods) + 0.75
    figure = Figure(figsize=(WIDTH_INCHES, 3.0 + num_rows * rows_inches), layout="constrained")
    _write_title(figure, report)
    grid = figure.add_gridspec(1 + num_rows, num_columns, height_ratios=(1.7, *[rows_inches] * num_rows))
    _draw_lengths(figure.add_subplot(grid[0, :]), report)
    for place, draw_into in enumerate(drawings):
        row, column = divmod(place, num_columns)
        axes = figure.add_subplot(grid[1 + row, column])
        draw_into(axes)
        _name_methods(axes, report, shown=column == 0)
    return figure


def _drawings(report: PackReport) -> list[Callable[[Axes], None]]:
    """The functions that draw the panels, in order; a single rank has no panels that compare ranks."""
    is_alone = report.workload.config.backbone.data_parallel_size == 1
    is_simulated = report.workload.search is not None
    shown = [
        panel for panel in PANELS if not (is_alone and panel.of_ranks) and not (panel.of_simulated and not is_simulated)
    ]
    drawings: list[Callable[[Axes], None]] = [partial(_draw_panel, panel=panel, report=report) for panel in shown]
    if not is_alone:
        place = next(number for number, panel in enumerate(shown) if panel.scale == "log")  # before the planning time
        drawings.insert(place, partial(_draw_dist_ratio, methods=report.methods))
    return drawings


def _write_title(figure: Figure, report: PackReport) -> None:
    """Write the title over the panels; the middle of a source name that is too long is left out."""
    workload, config = report.workload, report.workload.config
    rest = (
        f"{workload.order}, {workload.step_sizes}, over "
        f"{counted(config.backbone.data_parallel_size, 'data-parallel rank')}; microbatches of "
        f"{config.scheduler.microbatch_tokens:,} tokens, cost {workload.cost_label}\n"
        "Dots: medians (fill: all steps together); lines: from the smallest to the largest step or slot"
    )
    first = f"Packing of {workload.source}"
    title = figure.suptitle(first, fontsize=11, x=0.01, ha="left")
    most = len(first)
    while title.get_window_extent().width > 0.97 * figure.bbox.width:
        most -= 1 + most // 32
        title.set_text(_without_middle(first, most))
    title.set_text(f"{title.get_text()}\n{rest}")


def _without_middle(text: str, most: int) -> str:
    """Shorten a text to ``most`` characters: a third from its start, an ellipsis, the rest from its end."""
    head = most // 3
    return f"{text[:head]}…{text[len(text) - (most - head - 1) :]}"


def _draw_lengths(axes: Axes, report: PackReport) -> None:
    config = report.workload.config
    tokens = np.concatenate([step.lengths.tokens for step in report.workload.steps])
    axes.hist(tokens, bins=min(120, int(tokens.max()) if len(tokens) else 1), color=OTHER_COLOR)
    axes.set_title(f"Lengths of {len(tokens):,} samples", loc="left")
    axes.set_xlabel("backbone tokens of a sample")
    axes.set_ylabel("samples")
    limits = {config.scheduler.microbatch_tokens: ["scheduler.microbatch_tokens"]}
    limits.setdefault(config.data.max_seq_len, []).append("data.max_seq_len")
    for place, (limit, names) in enumerate(limits.items()):
        is_left = limit < 0.2 * max(limits)  # no room for the name to its left
        axes.axvline(limit, color=PAPER_COLOR, linestyle="--", linewidth=1)
        axes.annotate(
            "\n".join(names),
            (limit, 0.95 - 0.15 * place),
            xycoords=("data", "axes fraction"),
            xytext=(4 if is_left else -4, 0),
            textcoords="offset points",
            ha="left" if is_left else "right",
            va="top",
            color=PAPER_COLOR,
        )
    axes.set_xlim(left=0)
    _tidy(axes, "y")


def _draw_panel(axes: Axes, panel: Panel, report: PackReport) -> None:
    """A dot for the median (fill: all steps), and a line from the smallest to the largest step or slot."""
    most = 0.0
    for row, method in enumerate(report.methods):
        values = [value for step in method.steps for value in panel.of_step(step)]
        most, color = max(most, *values), _color(method, row)
        axes.plot(
            (min(values), max(values)), (row, row), color=color, linewidth=2.5, alpha=0.45, solid_capstyle="round"
        )
        axes.plot(panel.center(method), row, "o", color=color, markersize=6)
    axes.set_title(panel.title, loc="left")
    _scale(axes, panel.scale, most)
    _tidy(axes, "x")


def _scale(axes: Axes, scale: str, most: float) -> None:
    """Scale an axis whose largest value is ``most``, with ticks at round numbers."""
    if scale == "log":
        axes.set_xscale("log")
        least, greatest = np.log10(axes.get_xlim())
        axes.set_xlim(10 ** np.floor(least), 10 ** np.ceil(greatest))  # whole decades, so that they are labelled
        axes.xaxis.set_minor_formatter(NullFormatter())
    elif scale == "symlog" and most >= 1.0:  # spans decades, and reaches 0
        axes.set_xscale("symlog", linthresh=0.1)
        axes.set_xlim(left=0)
    else:
        if scale == "symlog":
            axes.set_xlim(0, max(1.05 * most, 0.1))
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _draw_dist_ratio(axes: Axes, methods: Sequence[MethodReport]) -> None:
    rows = np.arange(len(methods))
    series = (
        ("ViT", [method.dist_ratio_vision for method in methods], -0.17, VISION_COLOR),
        ("LLM", [method.dist_ratio_tokens for method in methods], 0.17, TOKENS_COLOR),
    )
    for name, values, offset, color in series:
        axes.barh(rows + offset, values, height=0.3, color=color, label=name)
    axes.set_title("DistRatio: idle share of ranks", loc="left")
    axes.set_xlim(0, 1.3 * max(*series[0][1], *series[1][1], 0.01))
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.legend(frameon=False, loc="center right")
    _tidy(axes, "x")


def _name_methods(axes: Axes, report: PackReport, shown: bool) -> None:
    configured = report.methods[0].method
    names = [method_name(each.method, configured) if shown else "" for each in report.methods]
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.5, -0.5)
    for row, (label, method) in enumerate(zip(axes.get_yticklabels(), report.methods, strict=True)):
        label.set_color(_color(method, row))


def _color(report: MethodReport, row: int) -> str:
    if row == 0:
        return CONFIGURED_COLOR
    return PAPER_COLOR if report.method == PAPER else OTHER_COLOR


def _tidy(axes: Axes, grid: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, alpha=0.3)  # type: ignore[arg-type]
    axes.set_axisbelow(True)


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
h1, td {{ overflow-wrap: anywhere; }}
body {{ font: 14px/1.5 system-ui, sans-serif; max-width: 80em; margin: 2em auto; padding: 0 1em; color: #1c2126; }}
table {{ border-collapse: collapse; margin: 1em 0; }}
th, td {{ padding: .2em .9em; text-align: right; border-bottom: 1px solid #dde1e5; }}
th:first-child, td:first-child {{ text-align: left; }}
.facts td {{ text-align: left; border: 0; padding-left: 0; }}
p {{ color: #5b636b; }}
svg {{ width: 100%; height: auto; }}
</style>
</head>
<body>
<h1>{title}</h1>
<table class="facts">{facts}</table>
<table>{table}</table>
<p>{legend}</p>
{svg}
</body>
</html>
"""


def _page(report: PackReport, svg: str) -> str:
    shown = shown_columns(report)
    columns = tuple(chain.from_iterable(shown.values()))
    headings = ["method", *(column.heading.replace("-\n", "").replace("\n", " ") for column in columns)]
    rows = [_row("th", headings), *(_row("td", row) for row in method_rows(report, columns))]
    return _PAGE.format(
        title=html.escape(f"Packing of {report.workload.source}"),
        facts="".join(_row("td", row) for row in fact_rows(report)),
        table="\n".join(rows),
        legend=html.escape(". ".join(CAPTIONS[name] for name in shown)),
        svg=svg,
    )


def _row(tag: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"
