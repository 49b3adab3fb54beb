"""Which positions each training step takes in ``data.order: arrival``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice


class ArrivalWindow:
    """Steps made of what is ready, oldest first, where no position waits longer than W steps.

    A position belongs by nature to the step that would run it in order; together these are the step's *group*. The
    position runs at most ``window`` (W) steps later; when that step comes, it is taken whether ready or not. The last
    step, and every ``close_every``-th one (the evaluations; None: there are none), closes the window: it takes all that
    is left of its own and earlier groups, and no step before it takes from groups behind it. So every evaluation sees
    the same positions trained as in order, and where it runs nothing older waits in the pool.
    """

    def __init__(self, window: int, last_step: int, close_every: int | None = None) -> None:
        assert window >= 1 and (close_every is None or close_every >= 1), (window, close_every)
        self._window = window
        self._last_step = last_step
        self._close_every = close_every
        self._groups: dict[int, list[int]] = {}  # by step, ascending: positions that no step has taken

    def add_group(self, step: int, positions: Sequence[int]) -> None:
        """Add what a step would run in order, ascending; groups come in the order of their steps."""
        assert not self._groups or step > next(reversed(self._groups)), (step, list(self._groups))
        if positions:
            self._groups[step] = list(positions)

    def deadline(self, step: int) -> int:
        """Return the last step that may run a position of this step's group."""
        return min(step + self._window, self._closing(step))

    def choose(self, step: int, size: int, is_done: Callable[[int], bool]) -> tuple[int, ...] | None:
        """Take the positions that a step runs, ascending, or return None while there are too few.

        size: positions of the step. is_done: whether a position is ready, or rejected. First come those whose last step
        this is, then the oldest that are done. Steps are to be asked for in their order.
        """
        chosen: list[int] = []
        for group, positions in self._groups.items():
            if len(chosen) == size or group > self._closing(step):
                break
            due = self.deadline(group) <= step
            chosen.extend(islice((p for p in positions if due or is_done(p)), size - len(chosen)))
        if len(chosen) < size:
            return None
        self._take(chosen)
        return tuple(chosen)

    def open_positions(self, step: int) -> tuple[int, ...]:
        """Return the positions that no step has taken, of groups up to this step's."""
        return tuple(p for group, positions in self._groups.items() if group <= step for p in positions)

    def _take(self, chosen: Sequence[int]) -> None:
        taken = set(chosen)
        for group, positions in list(self._groups.items()):
            left = [position for position in positions if position not in taken]
            if left:
                self._groups[group] = left
            else:
                del self._groups[group]

    def _closing(self, step: int) -> int:
        """The first step from this one on that closes the window."""
        if self._close_every is None:
            return self._last_step
        return min(self._last_step, -(-step // self._close_every) * self._close_every)
