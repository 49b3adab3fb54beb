"""The training positions that are consumed: all below a frontier, and in ``arrival`` order some beyond it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from flowtrain.types.samples import SamplerState


class ConsumedPositions:
    """A set of positions in little memory: all positions below ``frontier``, and the positions in ``ahead``."""

    def __init__(self, frontier: int = 0, ahead: Iterable[int] = ()) -> None:
        self.frontier = frontier
        self._ahead: set[int] = set()
        self.add(position for position in ahead if position >= frontier)

    @classmethod
    def at(cls, state: SamplerState) -> ConsumedPositions:
        """Return the positions that are consumed in a sampler's state."""
        return cls(state.next_position, state.consumed)

    def state_from(self, state: SamplerState, first: int) -> SamplerState:
        """Return ``state``, which stands at position ``first``, with the positions consumed from there on."""
        assert first <= self.frontier, (first, self.frontier)
        return replace(state, consumed=(*range(first, self.frontier), *self.ahead))

    @property
    def has_ahead(self) -> bool:
        """Whether there are positions beyond the frontier."""
        return bool(self._ahead)

    @property
    def ahead(self) -> tuple[int, ...]:
        """Positions beyond the frontier, ascending."""
        return tuple(sorted(self._ahead))

    def add(self, positions: Iterable[int]) -> None:
        """Add positions that are not in the set."""
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
