"""Which training positions are over: all below a frontier, and in ``arrival`` order some ahead of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

STATE_KEY = "consumed"
"""Where a sampler's state names positions from its ``next_position`` on that are consumed already."""


class ConsumedPositions:
    """A set of positions that stays small: ``frontier`` stands for all below it, ``ahead`` are those beyond it."""

    def __init__(self, frontier: int = 0, ahead: Iterable[int] = ()) -> None:
        self.frontier = frontier
        self._ahead: set[int] = set()
        self.add(position for position in ahead if position >= frontier)

    @classmethod
    def from_state(cls, state: Mapping[str, Any] | None) -> ConsumedPositions:
        """Read what ``state_from`` made; the sampler's state of a run in order names no positions, None none at all."""
        return cls(state["next_position"], state.get(STATE_KEY, ())) if state is not None else cls()

    def state_from(self, state: Mapping[str, int | list[int]], first: int) -> dict[str, int | list[int]]:
        """Return a sampler's state that stands at position ``first``, with what is consumed from there on."""
        assert first <= self.frontier, (first, self.frontier)
        return {**state, STATE_KEY: [*range(first, self.frontier), *self.ahead]}

    @property
    def ahead(self) -> tuple[int, ...]:
        """Positions beyond the frontier, ascending."""
        return tuple(sorted(self._ahead))

    def add(self, positions: Iterable[int]) -> None:
        """Add positions, none of which is in it."""
        for position in positions:
            assert position not in self, position
            self._ahead.add(position)
        while self.frontier in self._ahead:
            self._ahead.remove(self.frontier)
            self.frontier += 1

    def __contains__(self, position: int) -> bool:
        return position < self.frontier or position in self._ahead

    def __len__(self) -> int:
        return self.frontier + len(self._ahead)
