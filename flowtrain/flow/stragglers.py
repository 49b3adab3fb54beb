"""Which of several equal workers is much slower than the others, by robust statistics."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

WINDOW = 16
"""The last pieces of work of a worker that count."""
LEAST_PIECES = 6
"""With fewer nothing is said of a worker."""
LEAST_WORKERS = 3
"""Of two that differ nobody can tell which one is at fault."""
SLOW_RATIO = 1.5
"""A straggler takes at least so many times the usual time."""
MOST_DEVIATIONS = 5.0
"""And is so many standard deviations, estimated from the median absolute deviation, above it."""
LEAST_DEVIATION = 0.03
"""Share of the usual time that one deviation is at least."""
BACK_RATIO = 1.25
"""Below it a straggler counts as recovered, and can be named again."""
SIGMA_OF_MAD = 1.4826


@dataclass(frozen=True, slots=True)
class Slow:
    """A worker that is much slower than the others."""

    name: str
    ratio: float
    """Its time for a piece of work over the median of all workers."""
    num_workers: int
    """Workers that were compared."""


class StragglerWatch:
    """Compares the pace of workers: seconds for a unit of work, the median over each worker's last pieces.

    Median and median absolute deviation stay as they are when fewer than half of the workers, or of a worker's pieces,
    are odd. So neither a slow start nor one large batch makes a straggler.
    """

    def __init__(self) -> None:
        self._paces: dict[str, deque[float]] = {}
        self._named: set[str] = set()

    def add(self, name: str, seconds: float, work: float) -> None:
        """Note a piece of work. work: in any unit that all workers share; above 0."""
        self._paces.setdefault(name, deque(maxlen=WINDOW)).append(seconds / work)

    def forget(self, name: str) -> None:
        """Forget a worker that is gone."""
        self._paces.pop(name, None)
        self._named.discard(name)

    def found(self) -> tuple[Slow, ...]:
        """Return the stragglers that were not named before, the slowest first."""
        known = {name: median(paces) for name, paces in self._paces.items() if len(paces) >= LEAST_PIECES}
        if len(known) < LEAST_WORKERS:
            return ()
        usual, limit = limits_of(known.values())
        self._named -= {name for name, pace in known.items() if pace < BACK_RATIO * usual}
        slow = {name: pace for name, pace in known.items() if pace > limit and name not in self._named}
        self._named |= slow.keys()
        return tuple(
            Slow(name, pace / usual, len(known)) for name, pace in sorted(slow.items(), key=lambda each: -each[1])
        )


def limits_of(paces: Iterable[float]) -> tuple[float, float]:
    """Return the usual pace, and the one above which a worker is a straggler."""
    values = list(paces)
    usual = median(values)
    deviation = max(SIGMA_OF_MAD * median(abs(pace - usual) for pace in values), LEAST_DEVIATION * usual)
    return usual, max(SLOW_RATIO * usual, usual + MOST_DEVIATIONS * deviation)
