"""What a chart shows, without how it is drawn: lines and points over steps, marks, units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flowtrain.observability.report.sampling import FloatArray, moving_mean
from flowtrain.observability.report.units import Kind

NUM_COLORS = 6
SMOOTH_OVER = 60
"""A moving mean is over a part of so many parts of a line."""
MIN_TO_SMOOTH = 40


@dataclass(frozen=True, slots=True)
class Line:
    """One series of a chart."""

    label: str
    x: FloatArray
    """Steps, ascending."""
    y: FloatArray
    """NaN where there is no value."""
    color: int = 0
    """Index of the palette."""
    form: Literal["line", "points", "bound"] = "line"
    """``bound``: a limit, dashed."""
    is_faint: bool = False
    """Drawn lightly, under a line that smooths it; the legend leaves it out."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment that a chart shows as an upright line."""

    x: float
    text: str


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over steps with one axis of values."""

    key: str
    """Unique in a page; letters, digits and hyphens."""
    title: str
    lines: tuple[Line, ...]
    kind: Kind = "plain"
    unit: str = ""
    """Of the values, for ``kind`` plain or si."""
    note: str = ""
    """One or two sentences under the chart."""
    from_zero: bool = False
    is_log: bool = False
    is_tall: bool = False
    marks: tuple[Mark, ...] = ()

    def is_smoothed(self, line: Line) -> bool:
        """Whether a line is the moving mean of another one, which is drawn faintly."""
        return self.values_of(line) is not line

    def values_of(self, line: Line) -> Line:
        """Return the line that a moving mean smooths; any other line itself."""
        faint = (each for each in self.lines if each.is_faint and each.label == line.label)
        return line if line.is_faint else next(faint, line)


def smoothed(label: str, x: FloatArray, y: FloatArray, color: int = 0) -> list[Line]:
    """Return a line; of a long one its moving mean over the values as they are, drawn faintly."""
    if len(y) < MIN_TO_SMOOTH:
        return [Line(label, x, y, color)]
    return [Line(label, x, y, color, is_faint=True), Line(label, x, moving_mean(y, window_of(len(y))), color)]


def window_of(count: int) -> int:
    """Return over how many steps ``smoothed`` takes a mean, of so many steps."""
    return max(3, count // SMOOTH_OVER)
