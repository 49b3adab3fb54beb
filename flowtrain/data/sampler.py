"""The global order of samples: a weighted mixture of sources, each with its own epochs and a new shuffle per epoch.

Position p is a function of (blocks of the sources, weights, seed, shuffle) alone, and the state is a few integers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from fractions import Fraction
from typing import NamedTuple, Protocol

import numpy as np

from flowtrain.config.data import Shuffle
from flowtrain.costs.flops import IntArray
from flowtrain.data.lanes import Lanes
from flowtrain.data.permutation import Permutation
from flowtrain.errors import CheckpointError
from flowtrain.types.samples import SampleRef, SamplerState


class OrderOfEpoch(Protocol):
    """Orders the rows of a source."""

    def __call__(self, epoch: int) -> IntArray:
        """Return all rows in the order of an epoch, int64 ``[num_rows]``."""

    def digest(self) -> str:
        """Return what identifies all orders."""


class Draw(NamedTuple):  # created in a fraction of a dataclass's time
    """A sample of the order."""

    ref: SampleRef
    lane: int
    """Decides which feeder handles the sample. A block has one lane while it is open; with ``rows``, every position has
    its own."""


class Sampler:
    """Gives every position its sample.

    The mixture is exact: after n samples, the number from each source differs from its share of n by less than one.
    Each source has its own epochs: in each epoch, every row occurs once, in an order of this epoch.
    """

    def __init__(
        self,
        first_rows: Sequence[IntArray],
        weights: Sequence[float],
        seed: int,
        shuffle: Shuffle,
        shuffle_blocks: int,
        order_of: OrderOfEpoch | None = None,
    ) -> None:
        """first_rows: of each source ``[num_blocks + 1]``, the first row of each block and the number of rows.

        order_of: with ``rows``, gives the rows of an epoch of the only source in their order; None: at random.
        """
        self._sizes = tuple(int(table[-1]) for table in first_rows)
        assert len(first_rows) == len(weights) > 0 and min(self._sizes) > 0 and min(weights) > 0 and shuffle_blocks > 0
        self._first_rows = tuple(first_rows)
        self._seed = seed
        self._shuffle = shuffle
        self._shuffle_blocks = shuffle_blocks if shuffle == "blocks" else 0
        # Exact decimal weights (0.1 is 1/10), scaled to integers, so that no position is rounded.
        exact = [Fraction(str(weight)) for weight in weights]
        denominator = math.lcm(*(weight.denominator for weight in exact))
        self._weights = tuple(int(weight * denominator) for weight in exact)
        self._total_weight = sum(self._weights)
        self._next_position = 0
        self._counts = [0] * len(first_rows)
        self._windows = [self._window(source) for source in range(len(first_rows))]
        self._permutations: dict[int, tuple[int, Permutation]] = {}  # `rows`: of each source, its epoch's
        self._order_of = order_of
        self._orders: tuple[int, IntArray] | None = None  # of the epoch that ``order_of`` was last asked for
        self._spans = [(0, 0, 0)] * len(first_rows)  # `none`: of each source, the last block, its first row and its end
        self._lanes: tuple[Lanes, ...] = ()
        self._tables: tuple[str, ...] = ()
        if shuffle == "blocks":
            self._lanes = tuple(Lanes(table, shuffle_blocks, seed, i) for i, table in enumerate(first_rows))
            self._tables = tuple(lanes.digest() for lanes in self._lanes)
        elif order_of is not None:
            self._tables = (order_of.digest(),)

    def take(self, num_samples: int) -> list[Draw]:
        """Draw the samples of the next ``num_samples`` positions."""
        return [self._draw() for _ in range(num_samples)]

    def copy(self) -> Sampler:
        """Return a sampler that continues from the same position, to look ahead."""
        other = copy(self)
        other._counts, other._windows = self._counts.copy(), self._windows.copy()
        other._permutations, other._spans = self._permutations.copy(), self._spans.copy()
        other._lanes = tuple(lanes.copy() for lanes in self._lanes)
        return other

    def open_rows(self, source: int) -> Mapping[int, IntArray]:
        """Return the blocks of which some rows are drawn and some are not, each with the rows still to come, in order.

        With ``rows`` no block is open.
        """
        if self._shuffle == "blocks":
            return self._lanes[source].open_rows()
        if self._shuffle == "rows":
            return {}
        row = self._counts[source] % self._sizes[source]
        block, first, end = self._span(source, row)
        return {block: np.arange(row, end)} if first < row else {}

    def state(self) -> SamplerState:
        """Return the state after the last drawn sample."""
        begun = self._next_position > 0  # the first position is the same in any blocks
        return SamplerState(
            next_position=self._next_position,
            counts=tuple(self._counts),
            seed=self._seed,
            sizes=self._sizes,
            shuffle=self._shuffle,
            shuffle_blocks=self._shuffle_blocks,
            tables=self._tables if begun else (),
            lanes=tuple(lanes.state() for lanes in self._lanes) if begun else (),
        )

    def restore(self, state: SamplerState) -> None:
        """Continue from a state; raises CheckpointError if it comes from other data, seed or shuffle."""
        self._check(state)
        assert sum(state.counts) == state.next_position and len(state.counts) == len(self._sizes)
        self._next_position = state.next_position
        self._counts = list(state.counts)
        self._windows = [self._window(source) for source in range(len(self._counts))]
        for source, lanes in enumerate(self._lanes):
            epoch, index = divmod(self._counts[source], self._sizes[source])
            if index:
                lanes.restore(epoch, state.lanes[source])
            else:
                lanes.clear()

    def _check(self, state: SamplerState) -> None:
        if not state.shuffle and self._shuffle == "blocks":
            raise CheckpointError(
                "the checkpoint's data order was drawn row by row, before there were blocks, and data.shuffle is "
                "blocks: set data.shuffle to rows, which is the old order, or start a new run"
            )
        for name, stored, current in (
            ("seed", state.seed, self._seed),
            ("rows", state.sizes, self._sizes),
            ("data.shuffle", state.shuffle or self._shuffle, self._shuffle),
            ("data.shuffle_blocks", state.shuffle_blocks, self._shuffle_blocks),
            ("blocks of the sources (their digests)", state.tables or self._tables, self._tables),
        ):
            if stored != current:
                raise CheckpointError(
                    f"the checkpoint's data order was drawn with {name} {stored}, this run has {name} {current}: "
                    "resume with the same seed, the same data and the same data.shuffle, or start a new run"
                )

    def _draw(self) -> Draw:
        source = self._next_source()
        epoch, index = divmod(self._counts[source], self._sizes[source])
        position = self._next_position
        if self._lanes:
            row, lane = self._lanes[source].draw(epoch, index)
            lane += source  # else all sources of few blocks would go to the first feeders
        elif self._shuffle == "rows":
            row, lane = self._row(source, epoch, index), position
        else:
            row, lane = index, self._span(source, index)[0]
        self._counts[source] += 1
        self._windows[source] = self._window(source)
        self._next_position = position + 1
        return Draw(SampleRef(position, source, row, epoch), lane)

    def _next_source(self) -> int:
        """Choose, among the sources that are below their share, the one with the earliest deadline.

        Earliest deadline first keeps every source less than one sample from its share; choosing the largest deficit
        would not.
        """
        position = self._next_position
        best, best_deadline = -1, 0
        for source, (due, deadline) in enumerate(self._windows):
            if due <= position and (best < 0 or deadline < best_deadline):
                best, best_deadline = source, deadline
        assert best >= 0, "a source is always due"
        return best

    def _window(self, source: int) -> tuple[int, int]:
        """Return the positions [first, end) for a source's next sample: [floor(k / w), ceil((k + 1) / w)).

        k: its samples so far. w: its share.
        """
        count, weight, total = self._counts[source], self._weights[source], self._total_weight
        return count * total // weight, -(-(count + 1) * total // weight)

    def _row(self, source: int, epoch: int, index: int) -> int:
        if self._order_of is None:
            return self._permutation(source, epoch)[index]
        if self._orders is None or self._orders[0] != epoch:
            self._orders = (epoch, self._order_of(epoch))
        return int(self._orders[1][index])

    def _permutation(self, source: int, epoch: int) -> Permutation:
        kept = self._permutations.get(source)
        if kept is None or kept[0] != epoch:
            kept = (epoch, Permutation(self._sizes[source], self._seed, source, epoch))
            self._permutations[source] = kept
        return kept[1]

    def _span(self, source: int, row: int) -> tuple[int, int, int]:
        """Return the block that holds a row, its first row and its end."""
        _, first, end = self._spans[source]
        if not first <= row < end:
            table = self._first_rows[source]
            block = int(np.searchsorted(table, row, side="right")) - 1
            self._spans[source] = (block, int(table[block]), int(table[block + 1]))
        return self._spans[source]
