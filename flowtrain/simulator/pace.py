"""When steps that follow each other again and again have found their pace, so that no later one has to be timed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flowtrain.costs.flops import FloatArray

_SAME = 1e-9
"""Of the seconds of a round: times that differ by less are equal; they differ by rounding."""


class Pace:
    """Notices that all later rounds of steps take as long as the last.

    steps_of_round: different steps, which follow each other again and again. lookahead: steps that encoders may be
    ahead.
    """

    def __init__(self, steps_of_round: int, lookahead: int) -> None:
        self._steps_of_round, self._lookahead = steps_of_round, lookahead
        self._before: tuple[FloatArray, FloatArray] | None = None
        self._waited_s = 0.0

    def is_found(self, ends: FloatArray, free: Sequence[FloatArray], waited_s: float) -> bool:
        """Whether every later step ends as long after the one a round before it as the last of ``ends`` does.

        Asked after each step. ends: of the steps so far. free: when each replica of each encoder has nothing to do, and
        a device that carries an encoder beside a rank. waited_s: seconds of the last step in which the backbone waited
        for one of these.

        Later steps depend on these times and on when the next steps may be encoded, measured from the end of the last
        step. What is free earlier never delays anything, so where the backbone did not wait in the whole round it will
        not in the next.
        """
        self._waited_s += waited_s
        count, now = len(ends), float(ends[-1])
        if count % self._steps_of_round:
            return False
        first = count - 1 - self._lookahead
        opened = np.concatenate([np.zeros(max(0, -first)), ends[max(0, first) :]])
        # What is free before the next step may be encoded is as good as if it were free just then.
        busy = np.concatenate([np.zeros(0), *(np.sort(np.maximum(each, opened[0])) for each in free)])
        before, self._before = self._before, (opened - now, busy - now)
        waited_s, self._waited_s = self._waited_s, 0.0
        if before is None:
            return False
        seconds = now - float(ends[count - self._steps_of_round - 1])
        same_s = _SAME * seconds
        later_s = self._before[1] - before[1]
        is_same = bool((np.abs(self._before[0] - before[0]) <= same_s).all() and (later_s <= same_s).all())
        goes_on = waited_s <= same_s or bool((later_s >= -same_s).all())
        return is_same and goes_on

    def go_on(self, ends: FloatArray, count: int) -> None:
        """Set the ends of all steps but the first ``count``, of which the last round repeats."""
        last = ends[count - self._steps_of_round : count]
        seconds = last[-1] - ends[count - self._steps_of_round - 1]
        later = np.arange(len(ends) - count)
        ends[count:] = last[later % self._steps_of_round] + (later // self._steps_of_round + 1) * seconds
