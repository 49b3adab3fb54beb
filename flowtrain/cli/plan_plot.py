"""The plot of ``flowtrain plan``: the modes, and production, consumption and the rate over splits of the devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flowtrain.allocator.allocation import Allocation
from flowtrain.allocator.mode_reasons import rate_text
from flowtrain.cli.plan_tables import APART
from flowtrain.controller.planning.report import PlanReport

CONSUMPTION_COLOR, PRODUCTION_COLOR, RATE_COLOR, OTHERS_COLOR = "#c4570a", "#7b3fa0", "#1668a8", "#6f767f"
STYLE: Any = {"font.size": 9, "svg.fonttype": "path", "svg.hashsalt": "plan"}
WIDTH_INCHES, HEIGHT_INCHES, DPI = 11.0, 5.2, 130
_HEADROOM = 1.45
"""How far above the best rate the plot reaches; rates beyond it are of no use to the other side."""


def write_plot(report: PlanReport, path: Path) -> None:
    """Draw the report into ``path``; its ending decides the format."""
    with matplotlib.rc_context(STYLE):
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        draw(report).savefig(path, dpi=DPI, metadata=metadata)


def draw(report: PlanReport) -> Figure:
    """Return the figure: rates of the modes if there are several, and over splits of the devices if there are some."""
    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
    found = report.comparison.allocation
    has_splits, has_modes = has_splits_to_draw(report), len(report.comparison.ratings) > 1
    panels = iter(figure.subplots(1, has_splits + has_modes, squeeze=False)[0])
    if has_modes:
        _draw_modes(next(panels), report)
    if has_splits and found is not None:
        _draw_splits(next(panels), found, report)
    figure.suptitle(f"{report.planned.source}: {_devices(report)}", x=0.01, ha="left", fontweight="bold")
    return figure


def has_splits_to_draw(report: PlanReport) -> bool:
    """Whether there is a choice of splits, on one type of devices."""
    found = report.comparison.allocation
    return found is not None and len(found.split_curve) > 1


def _devices(report: PlanReport) -> str:
    return " and ".join(f"{each.count} {each.name}" for each in report.cluster.device_types)


def _draw_modes(axes: Axes, report: PlanReport) -> None:
    """A bar for each mode that fits, the winner on top."""
    rates = {rating.mode: rating.rate for rating in report.comparison.ratings if rating.rate is not None}
    modes = list(rates)[::-1]
    colors = [RATE_COLOR if mode == report.winner.mode else OTHERS_COLOR for mode in modes]
    bars = axes.barh(modes, [rates[mode] for mode in modes], color=colors)
    axes.bar_label(bars, [rate_text(rates[mode]) for mode in modes], padding=3)
    axes.set_xlim(0, 1.2 * max(rates.values()))
    axes.set_xlabel("samples/s")
    axes.set_title("modes, by packed batches", loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_splits(axes: Axes, found: Allocation, report: PlanReport) -> None:
    """Samples/s over the number of devices of the backbone; encoders have the rest."""
    (count,) = found.budget.values()
    _draw_lines(axes, found, count)
    axes.set_ylim(0, _HEADROOM * max(found.rate, *(point.rate for point in found.split_curve)))
    _draw_best(axes, found, report)
    axes.set_xlim(0, count)
    axes.set_xlabel(f"devices of the backbone; encoders have the rest of {count} {found.modules[-1].device_type}")
    axes.set_ylabel("samples/s")
    axes.set_title("splits of the devices, by formula", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="upper left")


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


def _draw_best(axes: Axes, found: Allocation, report: PlanReport) -> None:
    """Mark the best split by packed batches, which is the plan if its mode has won."""
    best = next((each for each in report.comparison.ratings if each.mode in APART and each.rate is not None), None)
    modules, by_formula, packed = found.modules, found.rate, ""
    if best is not None and best.rate_formula is not None and best.predicted is not None:
        modules, by_formula = best.modules, best.rate_formula
        packed = f", {rate_text(best.predicted)} by packed batches"
    word = "chosen" if report.winner is best else "best split"
    *encoders, backbone = modules
    axes.plot(backbone.devices, by_formula, "o", color=RATE_COLOR, markersize=9, zorder=5)
    text = "\n".join(
        [f"{word}: {rate_text(by_formula)} samples/s{packed}"]
        + [f"{each.name} {each.devices}: {each.degrees}" for each in (*encoders, backbone)]
    )
    is_right = backbone.devices > 0.5 * sum(found.budget.values())  # on the side with room below the lines
    axes.annotate(
        text,
        (backbone.devices, by_formula),
        xytext=(0.88 if is_right else 0.4, 0.06),
        textcoords="axes fraction",
        ha="right" if is_right else "left",
        va="bottom",
        color=RATE_COLOR,
        arrowprops={"arrowstyle": "-", "color": RATE_COLOR, "alpha": 0.6},
        bbox={"boxstyle": "round", "facecolor": "white", "edgecolor": RATE_COLOR},
    )
