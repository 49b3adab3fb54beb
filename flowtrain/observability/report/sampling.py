"""Long series for a picture: the range of each pixel column, moving means, and paired differences."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

COLUMNS = 480
"""Points of a line in a picture, at the most."""
_BLOCKS = 10
_T_QUANTILE = 2.262
"""Of Student's t at 97.5 %, for the means of ``_BLOCKS`` blocks."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A series with at most so many points, ascending in x; all arrays have one length."""

    x: FloatArray
    low: FloatArray
    mean: FloatArray
    high: FloatArray

    @property
    def is_reduced(self) -> bool:
        """Whether a point stands for several values."""
        return bool((self.low < self.high).any())


def sample(x: FloatArray, y: FloatArray, columns: int = COLUMNS) -> Sampled:
    """Reduce a series to the smallest, mean and largest value of each column; values that are not finite are left out.

    x: ascending. The smallest and the largest value of all stay in the picture.
    """
    known = np.isfinite(y) & np.isfinite(x)
    x, y = x[known], y[known]
    if len(x) <= columns:
        return Sampled(x, y, y, y)
    span = x[-1] - x[0]
    places = (x - x[0]) / span * columns if span > 0 else np.zeros(len(x))
    column = np.minimum(places.astype(np.int64), columns - 1)
    starts = np.flatnonzero(np.concatenate([[True], column[1:] != column[:-1]]))
    counts = np.diff(np.concatenate([starts, [len(x)]]))
    low, high = np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)
    with np.errstate(over="ignore"):
        mean = np.clip(np.add.reduceat(y, starts) / counts, low, high)
    return Sampled(np.add.reduceat(x, starts) / counts, low, mean, high)


def moving_mean(y: FloatArray, window: int) -> FloatArray:
    """Return the mean of the finite values in a window round each point; NaN where there is none."""
    finite = np.isfinite(y)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, y, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    index, half = np.arange(len(y)), window // 2
    start, end = np.maximum(index - half, 0), np.minimum(index + half + 1, len(y))
    num = counts[end] - counts[start]
    means: FloatArray = np.full(len(y), np.nan)
    np.divide(sums[end] - sums[start], num, out=means, where=num > 0)
    return means


@dataclass(frozen=True, slots=True)
class Difference:
    """The mean of paired differences, with an interval that holds it with 95 %."""

    num_pairs: int
    mean: float
    """NaN without pairs."""
    low: float | None
    """None with too few pairs."""
    high: float | None

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def paired_difference(differences: FloatArray) -> Difference:
    """Return the mean of differences in the order of steps.

    Neighbouring steps are alike, so the interval is that of the means of ten blocks of steps.
    """
    differences = differences[np.isfinite(differences)]
    count = len(differences)
    if count == 0:
        return Difference(0, math.nan, None, None)
    mean = float(differences.mean())
    if count < 2 * _BLOCKS:
        return Difference(count, mean, None, None)
    blocks = np.array([block.mean() for block in np.array_split(differences, _BLOCKS)])
    half = _T_QUANTILE * float(blocks.std(ddof=1)) / math.sqrt(_BLOCKS)
    middle = float(blocks.mean())
    return Difference(count, mean, min(middle - half, mean), max(middle + half, mean))
