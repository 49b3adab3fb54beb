"""Which losses stand out of those before them. No torch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

WINDOW_STEPS = 64
"""Losses that a new one is compared with."""
LEAST_STEPS = 16
"""With fewer nothing is called a spike."""
MOST_DEVIATIONS = 10.0
"""Standard deviations, estimated from the median absolute deviation, that a loss may lie above the median."""
LEAST_DEVIATION = 0.02
"""Share of the median that one deviation is at least: a loss that hardly moves has no spikes of noise."""
SIGMA_OF_MAD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


class LossWindow:
    """The losses of the last steps that made an update, and what is a spike against them.

    Median and median absolute deviation stay as they are when a few of the losses are wild, so that one spike does not
    hide the next. All ranks have the same losses, so all decide the same.
    """

    def __init__(self, losses: Iterable[float] = ()) -> None:
        self._losses: deque[float] = deque(losses, maxlen=WINDOW_STEPS)

    @property
    def limit(self) -> float:
        """The largest loss that is no spike; infinite while too few steps are known."""
        if len(self._losses) < LEAST_STEPS:
            return math.inf
        middle = median(self._losses)
        deviation = SIGMA_OF_MAD * median(abs(loss - middle) for loss in self._losses)
        return middle + MOST_DEVIATIONS * max(deviation, LEAST_DEVIATION * abs(middle))

    def is_spike(self, loss: float) -> bool:
        """Whether a finite loss is too far above the others; one that is not finite is no spike but worse."""
        return math.isfinite(loss) and loss > self.limit

    def add(self, loss: float) -> None:
        """Add the loss of a step that made an update."""
        self._losses.append(loss)

    def replace(self, losses: Iterable[float]) -> None:
        """Know these losses alone, the oldest first."""
        self._losses = deque(losses, maxlen=WINDOW_STEPS)
