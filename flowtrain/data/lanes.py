"""Rows of a source in shuffled blocks: some blocks are open at a time, each in a lane, and their rows are mixed."""

from __future__ import annotations

import hashlib
from copy import copy

import numpy as np

from flowtrain.costs.flops import IntArray
from flowtrain.data.permutation import Choices, Permutation
from flowtrain.types.samples import LanesState

_DRY = -1


class Lanes:
    """Draws each row of a source once an epoch, from at most ``num_lanes`` open blocks.

    Blocks come in an order of the epoch, their rows in an order of their own. A draw takes the next row of a random
    lane. A lane whose block is exhausted gets the next block in line; at the end of an epoch lanes run dry.
    """

    def __init__(self, first_rows: IntArray, num_lanes: int, seed: int, source: int) -> None:
        """first_rows: ``[num_blocks + 1]``, the first row of each block and the number of rows."""
        self._first_rows = first_rows
        self._blocks = np.flatnonzero(np.diff(first_rows))  # [num_filled]: blocks without rows are passed over
        self._num_lanes = min(num_lanes, len(self._blocks))
        self._key = (seed, source)
        self.clear()

    def clear(self) -> None:
        """Stand between two epochs, where no lane has a block."""
        self._epoch = -1
        self._next_ordinal = 0
        self._ordinals: list[int] = []  # of each lane, the place of its block in the epoch's order
        self._taken: list[int] = []  # of each lane, rows drawn from its block
        self._rows: list[IntArray | None] = []  # of each lane, the rows of its block in their order; None until drawn
        self._live: list[int] = []  # lanes with rows left

    def draw(self, epoch: int, index: int) -> tuple[int, int]:
        """Return the row that comes at ``index`` of an epoch, and its lane; every index must be drawn in its turn."""
        if index == 0:
            self._begin(epoch)
        live = self._live
        lane = live[self._choices.choose(index, len(live))]
        rows, taken = self._rows[lane], self._taken[lane]
        if rows is None:
            rows = self._rows[lane] = self._rows_of(self._ordinals[lane])
        row = rows.item(taken)
        self._taken[lane] = taken + 1
        if taken + 1 == len(rows):
            self._next_block_to(lane)
        return row, lane

    def state(self) -> LanesState:
        """Return where the lanes stand; all zero between two epochs."""
        return LanesState(self._next_ordinal, tuple(self._ordinals), tuple(self._taken))

    def restore(self, epoch: int, state: LanesState) -> None:
        """Go on in the middle of an epoch."""
        assert len(state.blocks) == len(state.taken) == self._num_lanes
        self._begin(epoch)
        self._next_ordinal, self._ordinals, self._taken = state.next_block, list(state.blocks), list(state.taken)
        self._live = [lane for lane, ordinal in enumerate(state.blocks) if ordinal != _DRY]

    def open_rows(self) -> dict[int, IntArray]:
        """Return the blocks of which some rows are drawn and some are not, each with the rows still to come."""
        return {
            self._block(ordinal): self._rows_of(ordinal)[taken:]
            for ordinal, taken in zip(self._ordinals, self._taken, strict=True)
            if taken
        }

    def digest(self) -> str:
        """Return a short hash of the blocks."""
        table = np.ascontiguousarray(self._first_rows, dtype="<i8")
        return hashlib.blake2b(table.tobytes(), digest_size=8).hexdigest()

    def copy(self) -> Lanes:
        """Return lanes that stand where these do."""
        other = copy(self)
        for name in ("_ordinals", "_taken", "_rows", "_live"):
            setattr(other, name, getattr(self, name).copy())
        return other

    def _begin(self, epoch: int) -> None:
        self._epoch = epoch
        self._choices = Choices(*self._key, epoch, "lanes")
        self._order = Permutation(len(self._blocks), *self._key, epoch, "blocks")
        lanes = range(self._num_lanes)
        self._next_ordinal = self._num_lanes
        self._ordinals, self._taken, self._rows = list(lanes), [0] * len(lanes), [None] * len(lanes)
        self._live = list(lanes)

    def _next_block_to(self, lane: int) -> None:
        self._taken[lane], self._rows[lane] = 0, None
        if self._next_ordinal < len(self._blocks):
            self._ordinals[lane] = self._next_ordinal
            self._next_ordinal += 1
            return
        self._ordinals[lane] = _DRY
        self._live.remove(lane)
        if not self._live:
            self.clear()

    def _block(self, ordinal: int) -> int:
        return int(self._blocks[self._order[ordinal]])

    def _rows_of(self, ordinal: int) -> IntArray:
        block = self._block(ordinal)
        first, end = int(self._first_rows[block]), int(self._first_rows[block + 1])
        return first + Permutation(end - first, *self._key, self._epoch, "rows", block).items()
