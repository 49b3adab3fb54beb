"""Numbers for people: units, durations, sizes, and the ticks of an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Literal

NBSP = "\u00a0"
"""Between a number and its unit."""
MISSING = "\u2013"
"""For a value that is not known."""

Kind = Literal["plain", "share", "seconds", "nbytes", "si"]
"""How the values of an axis are scaled: as they are, %, a unit of time, of bytes, or k, M, G, T."""

_SI = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BYTES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_SECONDS = ((7200.0, 3600.0, "h"), (120.0, 60.0, "min"), (1.0, 1.0, "s"), (1e-3, 1e-3, "ms"))


@dataclass(frozen=True, slots=True)
class Scale:
    """What the values of an axis are divided by, and the unit that they then have."""

    divisor: float = 1.0
    unit: str = ""


def scale_for(kind: Kind, largest: float, unit: str = "") -> Scale:
    """Return a scale in which the largest value is easy to read. unit: of the values, as in ``tokens/s``."""
    if kind == "share":
        return Scale(0.01, "%")
    if kind == "seconds":
        for least, divisor, name in _SECONDS:
            if largest >= least:
                return Scale(divisor, name)
        return Scale(1e-6, "\u00b5s")
    steps: Sequence[tuple[float, str]] = {"nbytes": _BYTES, "si": _SI}.get(kind, ())
    for divisor, name in steps:
        if largest >= divisor:
            return Scale(divisor, f"{name} {unit}".strip() if kind == "si" else name)
    return Scale(1.0, "B" if kind == "nbytes" else unit)


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with at least ``digits`` significant digits."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    power = math.floor(math.log10(abs(value)))
    if power < -4 or power > 14:
        return f"{value:.{digits}g}"
    return f"{value:,.{max(digits - 1 - power, 0)}f}"


def scaled(value: float | None, kind: Kind, unit: str = "") -> str:
    """Return a value with its unit, such as ``3.20 k tokens/s`` or ``1.50 GiB``."""
    if value is None or not math.isfinite(value):
        return MISSING
    if kind == "share":
        return percent(value)
    if kind == "seconds":
        return duration(value)
    scale = scale_for(kind, abs(value), unit)
    return f"{number(value / scale.divisor)}{NBSP}{scale.unit}".strip(NBSP)


def percent(share: float | None) -> str:
    """Return a share as a percentage: a digit after the point below 10 %."""
    if share is None or not math.isfinite(share):
        return MISSING
    value = 100 * share
    return f"{value:.1f}{NBSP}%" if 0 < abs(value) < 10 else f"{value:,.0f}{NBSP}%"


def duration(seconds: float | None) -> str:
    """Return a duration in one or two units."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    if abs(seconds) < 60:
        scale = scale_for("seconds", abs(seconds))
        return "0 s".replace(" ", NBSP) if seconds == 0 else f"{number(seconds / scale.divisor)}{NBSP}{scale.unit}"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}{NBSP}d {hours}{NBSP}h"
    return f"{hours}{NBSP}h {minutes:02d}{NBSP}min" if hours else f"{minutes}{NBSP}min {rest:02d}{NBSP}s"


def moment(timestamp: float | None) -> str:
    """Return a time in UTC, to the second."""
    if timestamp is None or not 0 <= timestamp < 1e11:
        return MISSING
    return datetime.fromtimestamp(timestamp, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, such as ``1 step`` or ``2 steps``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def nice_ticks(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """Return round numbers from ``low`` to ``high``, ascending, about ``most`` at the most; whole: no fractions."""
    span = high - low
    if not math.isfinite(span) or span <= max(1e-12 * max(abs(low), abs(high)), 1e-300):
        return [low] if math.isfinite(low) else []
    raw = span / max(most, 1)
    magnitude = 10.0 ** math.floor(math.log10(raw))
    if whole:
        magnitude = max(magnitude, 1.0)
    steps = (1.0, 2.0, 5.0, 10.0) if whole else (1.0, 2.0, 2.5, 5.0, 10.0)
    step = next((each * magnitude for each in steps if each * magnitude >= raw * (1 - 1e-9)), 10.0 * magnitude)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return the powers of ten from ``low`` to ``high``, both above 0; every second or third if there are many."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    every = max(1, (last - first) // 5)
    return [10.0**power for power in range(first, last + 1, every)]


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Return the texts of ticks, all with as many digits as their distance needs."""
    if not ticks:
        return []
    largest = max(abs(tick) for tick in ticks)
    gaps = [later - earlier for earlier, later in pairwise(ticks)]
    step = min((gap for gap in gaps if gap > 0), default=largest or 1.0)
    if largest >= 1e12 or step < 1e-4:
        return [f"{tick:.4g}" for tick in ticks]
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    if digits < 6 and abs(round(step, digits) - step) > 1e-9 * step:  # as 2.5, or 0.25
        digits += 1
    return [f"{tick:,.{digits}f}" for tick in ticks]
