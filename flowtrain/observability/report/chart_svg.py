"""Draws a chart as SVG: lines stretch with the page, texts and marks keep their size.

The picture is the plot; labels are in the margins that the style sheet gives it. Places are percentages, and the lines
are in an inner picture that is stretched. So a chart needs neither a script nor a second version for narrow pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from flowtrain.observability.report.figures import NUM_COLORS, Chart, Line
from flowtrain.observability.report.markup import element
from flowtrain.observability.report.sampling import FloatArray, Sampled, sample
from flowtrain.observability.report.units import Scale, log_ticks, nice_ticks, number, scale_for, scaled, tick_labels

SIZE = 1000
"""Side of the inner picture."""
HOVER_COLUMNS = 48
MAX_MARKS = 60
MAX_LOG_RATIO = 1e12
"""Values further apart have no logarithmic axis: some of them are 0, but for rounding."""
_ROOM = 0.05


@dataclass(frozen=True, slots=True)
class Axes:
    """Ranges of a chart, in the values' own units, and the scale of its ticks."""

    left: float
    right: float
    low: float
    high: float
    is_log: bool
    scale: Scale

    def x(self, value: FloatArray | float) -> FloatArray | float:
        """Return places from 0 at the left to 1 at the right."""
        return (value - self.left) / (self.right - self.left)

    def y(self, value: FloatArray | float) -> FloatArray | float:
        """Return places from 0 at the top to 1 at the bottom."""
        low, high = self.low, self.high
        if self.is_log:
            with np.errstate(divide="ignore", invalid="ignore"):
                return 1 - (np.log10(value) - math.log10(low)) / (math.log10(high) - math.log10(low))
        return 1 - (value - low) / (high - low)


def axes_of(chart: Chart) -> Axes | None:
    """Return the ranges that hold all of a chart's values; None if it has none."""
    known = [(line.x[np.isfinite(line.y)], line.y[np.isfinite(line.y)]) for line in chart.lines]
    known = [(x, y) for x, y in known if len(y)]
    if not known:
        return None
    left, right = min(float(x.min()) for x, _ in known), max(float(x.max()) for x, _ in known)
    low, high = min(float(y.min()) for _, y in known), max(float(y.max()) for _, y in known)
    if right <= left:
        left, right = left - 0.5, right + 0.5
    is_log = chart.is_log and high > 10 * low > high / MAX_LOG_RATIO
    scale = scale_for(chart.kind, max(abs(low), abs(high)), chart.unit)
    if is_log:
        return Axes(left, right, low / 1.2, high * 1.2, True, scale)
    if chart.from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        room = abs(high) / 2 or 1.0
        low, high = (0.0, high + room) if chart.from_zero and high >= 0 else (low - room, high + room)
    room = _ROOM * (high - low)
    low = low if chart.from_zero and low == 0 else low - room
    return Axes(left, right, low, high + room, False, scale)


def draw_chart(chart: Chart, x_name: str = "step") -> Markup:
    """Return a chart as an SVG picture with a name and a description; an empty one without values."""
    axes = axes_of(chart)
    if axes is None:
        return Markup("")
    samples = [sample(line.x, line.y) for line in chart.lines]
    return element(
        "svg",
        element("title", chart.title, id=f"{chart.key}-title"),
        element("desc", description(chart, x_name), id=f"{chart.key}-desc"),
        _grid(axes, x_name),
        _lines(axes, chart, samples),
        _hovers(axes, chart, x_name),
        _marks(axes, chart),  # over the columns, so that the pointer finds them
        class_="chart tall" if chart.is_tall else "chart",
        role="img",
        aria_labelledby=f"{chart.key}-title {chart.key}-desc",
    )


def description(chart: Chart, x_name: str = "step") -> str:
    """Return in words what a chart shows, for those who do not see it."""
    said = []
    for line in (chart.values_of(each) for each in chart.lines if not each.is_faint):
        known = np.isfinite(line.y)
        if not known.any():
            continue
        x, y = line.x[known], line.y[known]
        first, last = (scaled(float(y[place]), chart.kind, chart.unit) for place in (0, -1))
        low, high = (scaled(float(value), chart.kind, chart.unit) for value in (y.min(), y.max()))
        said.append(
            f"{line.label}: from {first} at {x_name} {x[0]:,.0f} to {last} at {x_name} {x[-1]:,.0f}, "
            f"between {low} and {high}."
        )
    return " ".join(said)


def _grid(axes: Axes, x_name: str) -> Iterator[Markup]:
    divisor = axes.scale.divisor
    if axes.is_log:
        ticks = log_ticks(axes.low / divisor, axes.high / divisor)
        labels = [number(tick, 1) for tick in ticks]
    else:
        ticks = nice_ticks(axes.low / divisor, axes.high / divisor, 4)
        labels = tick_labels(ticks)
    for tick, label in zip(ticks, labels, strict=True):
        y = _percent(axes.y(tick * divisor))
        yield element("line", class_="grid", x1="0%", x2="100%", y1=y, y2=y)
        yield element("text", label, class_="tick-y", x=0, y=y, dx=-8, dy="0.32em")
    if axes.scale.unit:
        yield element("text", axes.scale.unit, x=0, y=0, dy=-5)
    steps = nice_ticks(axes.left, axes.right, 5, whole=True)
    for tick, label in zip(steps, tick_labels(steps), strict=True):
        yield element("text", label, class_="tick-x", x=_percent(axes.x(tick)), y="100%", dy="1.4em")
    yield element("line", class_="axis", x1="0%", x2="100%", y1="100%", y2="100%")
    yield element("text", x_name, class_="name-x", x="100%", y="100%", dy="2.7em")


def _lines(axes: Axes, chart: Chart, samples: Sequence[Sampled]) -> Iterator[Markup]:
    shapes: list[Markup] = []
    for line, points in zip(chart.lines, samples, strict=True):
        if line.form == "points" or not len(points.x):
            continue
        name = f"c{line.color % NUM_COLORS}"
        if points.is_reduced and not chart.is_smoothed(line):
            shapes.append(element("path", class_=f"band {name}", d=_band(axes, points)))
        faint = " faint" if line.is_faint else ""
        form = " bound" if line.form == "bound" else ""
        shapes.append(element("path", class_=f"line {name}{faint}{form}", d=_path(axes, points.x, points.mean)))
    yield element("svg", shapes, viewBox=f"0 0 {SIZE} {SIZE}", preserveAspectRatio="none", width="100%", height="100%")
    for line, points in zip(chart.lines, samples, strict=True):
        if line.form == "points" or (len(points.x) == 1 and not line.is_faint):
            name = f"dot c{line.color % NUM_COLORS}"
            for x, y in zip(points.x, points.mean, strict=True):
                yield element("circle", class_=name, cx=_percent(axes.x(x)), cy=_percent(axes.y(y)), r=3.2)


def _marks(axes: Axes, chart: Chart) -> Iterator[Markup]:
    for mark in chart.marks[:MAX_MARKS]:
        if axes.left <= mark.x <= axes.right:
            x = _percent(axes.x(mark.x))
            title = element("title", mark.text)
            yield element("line", title, class_="mark", x1=x, x2=x, y1="0%", y2="100%")


def _hovers(axes: Axes, chart: Chart, x_name: str) -> Iterator[Markup]:
    """Yield columns that show their values while the pointer is over them."""
    width = (axes.right - axes.left) / HOVER_COLUMNS
    shown = [line for line in chart.lines if line.form != "bound"]
    for column in range(HOVER_COLUMNS):
        start = axes.left + column * width
        end = start + width if column < HOVER_COLUMNS - 1 else math.inf
        texts = [text for line in shown if (text := _values(chart, line, start, end))]
        if not texts:
            continue
        steps = np.concatenate([line.x[_between(line, start, end)] for line in shown])
        first, last = f"{steps.min():,.0f}", f"{steps.max():,.0f}"
        title = f"{x_name} {first}" if first == last else f"{x_name}s {first} to {last}"
        yield element(
            "rect",
            element("title", "\n".join([title, *texts])),
            class_="hover",
            x=_percent(column / HOVER_COLUMNS),
            y=0,
            width=_percent(1 / HOVER_COLUMNS),
            height="100%",
        )


def _values(chart: Chart, line: Line, start: float, end: float) -> str:
    """Return a line's values between two steps; of a smoothed one those that it smooths say more."""
    if chart.is_smoothed(line):
        return ""
    found = line.y[_between(line, start, end)]
    found = found[np.isfinite(found)]
    if not len(found):
        return ""
    low, mean, high = (
        scaled(float(value), chart.kind, chart.unit) for value in (found.min(), found.mean(), found.max())
    )
    return f"{line.label}: {mean}" if low == high else f"{line.label}: {mean} ({low} to {high})"


def _between(line: Line, start: float, end: float) -> slice:
    return slice(int(np.searchsorted(line.x, start)), int(np.searchsorted(line.x, end)))


def _path(axes: Axes, x: FloatArray, y: FloatArray) -> str:
    across, down = _places(axes.x(x)), _places(axes.y(y))
    return "M" + "L".join(f"{a} {b}" for a, b in zip(across, down, strict=True))


def _band(axes: Axes, points: Sampled) -> str:
    across, top, bottom = _places(axes.x(points.x)), _places(axes.y(points.high)), _places(axes.y(points.low))
    there = [f"{a} {b}" for a, b in zip(across, top, strict=True)]
    back = [f"{a} {b}" for a, b in zip(across[::-1], bottom[::-1], strict=True)]
    return "M" + "L".join(there + back) + "Z"


def _places(shares: FloatArray | float) -> list[str]:
    """Return coordinates in the inner picture; what a logarithmic axis cannot hold is at its edge."""
    clipped = np.clip(np.nan_to_num(np.asarray(shares) * SIZE, nan=SIZE, posinf=SIZE, neginf=0.0), -SIZE, 2 * SIZE)
    return [f"{value:.1f}".removesuffix(".0") for value in clipped.tolist()]


def _percent(share: FloatArray | float) -> str:
    value = float(share)
    return f"{100 * value:.2f}%" if math.isfinite(value) else "100%"
