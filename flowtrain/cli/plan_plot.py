"""The plot of ``flowtrain plan``: production, consumption and the rate over all splits of the devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flowtrain.allocator.allocation import Allocation
from flowtrain.controller.planning.report import PlanReport

CONSUMPTION_COLOR, PRODUCTION_COLOR, RATE_COLOR, OTHERS_COLOR = "#c4570a", "#7b3fa0", "#1668a8", "#6f767f"
STYLE: Any = {"font.size": 9, "svg.fonttype": "path", "svg.hashsalt": "plan"}
WIDTH_INCHES, HEIGHT_INCHES, DPI = 9.0, 5.2, 130
_SPLIT_MODES = ("decoupled", "disaggregated")
_HEADROOM = 1.45
"""How far above the best rate the plot reaches; rates beyond it are of no use to the other side."""


def write_plot(report: PlanReport, path: Path) -> None:
    """Draw the report into ``path``; its ending decides the format."""
    with matplotlib.rc_context(STYLE):
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        draw(report).savefig(path, dpi=DPI, metadata=metadata)


def draw(report: PlanReport) -> Figure:
    """Return the figure: samples/s over the number of devices of the backbone; encoders have the rest."""
    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
    axes = figure.add_subplot()
    found = report.allocation
    (count,) = found.budget.values()
    _draw_lines(axes, found, count)
    others = {each.mode: each.rate for each in report.comparison.ratings if each.mode not in _SPLIT_MODES and each.rate}
    axes.set_ylim(0, _HEADROOM * max(found.rate, *others.values(), *(point.rate for point in found.split_curve)))
    for (mode, rate), style in zip(others.items(), ("--", ":"), strict=False):
        axes.axhline(rate, color=OTHERS_COLOR, linestyle=style, linewidth=1, label=f"mode {mode}")
    _draw_chosen(axes, found)
    axes.set_xlim(0, count)
    axes.set_xlabel(f"devices of the backbone; encoders have the rest of {count} {found.modules[-1].device_type}")
    axes.set_ylabel("samples/s")
    axes.set_title(f"Rate over the split of devices: {report.planned.source}", loc="left", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="upper left", ncols=2)
    return figure


def _draw_lines(axes: Axes, found: Allocation, count: int) -> None:
    """Draw lines as stairs: a configuration stays the best until there are enough devices for another."""
    points = sorted(found.split_curve, key=lambda point: point.backbone_devices)
    devices = [point.backbone_devices for point in points]
    taken = [point.consumption for point in points]
    axes.plot(
        [*devices, count],
        [*taken, taken[-1]],
        color=CONSUMPTION_COLOR,
        drawstyle="steps-post",
        label="consumption of the backbone",
    )
    axes.plot(
        [count - needed for needed, _ in (*found.production_curve[:1], *found.production_curve)],
        [0.0, *(rate for _, rate in found.production_curve)],  # with fewer devices nothing is produced
        color=PRODUCTION_COLOR,
        drawstyle="steps-post",
        label="production of encoders on the rest",
    )
    axes.plot(
        devices,
        [point.rate for point in points],
        "o",
        color=RATE_COLOR,
        markersize=3.5,
        label="rate: the smaller of both, of each configuration",
    )


def _draw_chosen(axes: Axes, found: Allocation) -> None:
    *encoders, backbone = found.modules
    axes.plot(backbone.devices, found.rate, "o", color=RATE_COLOR, markersize=9, zorder=5)
    text = "\n".join(
        [f"chosen: {found.rate:.4g} samples/s"]
        + [f"{each.name} {each.devices}: {each.degrees}" for each in (*encoders, backbone)]
    )
    is_right = backbone.devices > 0.5 * sum(found.budget.values())  # on the side with room below the lines
    axes.annotate(
        text,
        (backbone.devices, found.rate),
        xytext=(0.88 if is_right else 0.4, 0.06),
        textcoords="axes fraction",
        ha="right" if is_right else "left",
        va="bottom",
        color=RATE_COLOR,
        arrowprops={"arrowstyle": "-", "color": RATE_COLOR, "alpha": 0.6},
        bbox={"boxstyle": "round", "facecolor": "white", "edgecolor": RATE_COLOR},
    )
