"""Operations of one replica as rows that tell all by themselves, which can be repeated and become a program."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from flowtrain.costs.flops import IntArray
from flowtrain.simulator.program import BoolArray, Computations, Fetches, Op, Program, Transfers


class Column(IntEnum):
    """Columns of a row; ``GOES_BACK`` to ``PART`` name a computation or a transfer."""

    OP = 0
    """Its ``Op``."""
    GOES_BACK = 1
    """1 for a backward, and for the transfer of a gradient."""
    PLACE = 2
    """Of the stage that computes, or produces what is transferred."""
    MICROBATCH = 3
    PART = 4
    """Sub-microbatch, or ``WHOLE``."""
    PEER = 5
    """Rank at the other end of a transfer; ``Group`` of a meeting; 0 for others."""
    ENDS = 6
    """Of a computation: 1 for its stage's first forward, 2 for its last backward; 0 for others."""


FIRST_FORWARD, LAST_BACKWARD = 1, 2
_KEY = [Column.GOES_BACK, Column.PLACE, Column.MICROBATCH, Column.PART]


@dataclass(frozen=True, slots=True, eq=False)
class ListedOps:
    """Operations of all ranks, one rank's after another's."""

    first: IntArray
    """First operation of each rank, and their number, ``[R + 1]``."""
    rows: IntArray
    """``[N, 7]``, by ``Column``."""

    def of_rank(self, rank: int) -> IntArray:
        """Return the rows of one rank."""
        return self.rows[self.first[rank] : self.first[rank + 1]]

    def repeated(self, longer: ListedOps, period: int, times: int) -> ListedOps | None:
        """Return the lists of ``times * period`` microbatches more; None if these lists do not repeat themselves yet.

        longer: the same schedule's lists of ``period`` microbatches more. What it has more must be what came right
        before, with later microbatches: so goes each further period.
        """
        found = []
        for rank in range(len(self.first) - 1):
            mine, theirs, later = self.of_rank(rank), longer.of_rank(rank), np.zeros(len(Column), dtype=np.int64)
            later[Column.MICROBATCH] = period
            alike = (mine == theirs[: len(mine)]).all(axis=1)
            start = len(mine) if alike.all() else int(alike.argmin())
            size = len(theirs) - len(mine)
            more, rest = theirs[start : start + size], theirs[start + size :]
            if start < size or (more != theirs[start - size : start] + later).any():
                return None
            if (rest != mine[start:] + later).any():
                return None
            every = more + np.arange(times)[:, None, None] * later
            found.append(np.concatenate([mine[:start], every.reshape(-1, len(Column)), mine[start:] + times * later]))
        return ListedOps(np.cumsum([0, *map(len, found)]), np.concatenate(found))

    def program(self) -> Program:
        """Return them as what the engine runs."""
        rows, op = self.rows, self.rows[:, Column.OP].astype(np.int8)
        ranks = np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))
        keys, index = _keys(rows), np.zeros(len(rows), dtype=np.int64)
        index[op == Op.MEET] = rows[op == Op.MEET, Column.PEER]
        computing, fetching = np.flatnonzero(op == Op.COMPUTE), np.flatnonzero(op == Op.FETCH)
        index[computing], index[fetching] = np.arange(len(computing)), np.arange(len(fetching))
        sending = np.flatnonzero(op == Op.ISEND)
        lanes = ranks[sending], rows[sending, Column.PEER]
        order = np.lexsort((*lanes[::-1],))  # stable: those of a lane stay in the order of their launches
        sending, lanes = sending[order], (lanes[0][order], lanes[1][order])
        transferring = np.flatnonzero((op >= Op.ISEND) & (op <= Op.WAIT_IRECV))
        index[transferring] = _find(keys[sending], keys[transferring])
        return Program(
            first=self.first,
            op=op,
            index=index,
            computations=self._computations(ranks, computing),
            transfers=self._transfers(sending, *lanes),
            fetches=Fetches(ranks[fetching], rows[fetching, Column.MICROBATCH]),
        )

    def _computations(self, ranks: IntArray, at: IntArray) -> Computations:
        rows, is_backward = self.rows[at], self.rows[at, Column.GOES_BACK] > 0
        undone = rows.copy()
        undone[:, Column.GOES_BACK] = 0
        forwards, number = np.flatnonzero(~is_backward), _keys(undone)
        return Computations(
            rank=ranks[at],
            op=at,
            place=rows[:, Column.PLACE],
            microbatch=rows[:, Column.MICROBATCH],
            part=rows[:, Column.PART],
            is_backward=is_backward,
            is_last=rows[:, Column.ENDS] == LAST_BACKWARD,
            is_first=rows[:, Column.ENDS] == FIRST_FORWARD,
            forward=forwards[_find(number[forwards], number)],
        )

    def _transfers(self, at: IntArray, source: IntArray, destination: IntArray) -> Transfers:
        rows = self.rows[at]
        begins = np.ones(len(at), dtype=np.bool_)
        begins[1:] = (source[1:] != source[:-1]) | (destination[1:] != destination[:-1])
        return Transfers(
            source=source,
            destination=destination,
            place=rows[:, Column.PLACE],
            microbatch=rows[:, Column.MICROBATCH],
            part=rows[:, Column.PART],
            is_gradient=rows[:, Column.GOES_BACK] > 0,
            lane_start=_last_true(begins),
        )


def _keys(rows: IntArray) -> IntArray:
    """One number for each row's computation or transfer, ``[N]``."""
    values = rows[:, _KEY] + 1  # a part may be -1
    return np.ravel_multi_index(tuple(values.T), tuple(values.max(axis=0, initial=0) + 1))


def _find(known: IntArray, asked: IntArray) -> IntArray:
    """Return where each number lies in ``known``, which has it once."""
    order = np.argsort(known, kind="stable")
    found = order[np.minimum(np.searchsorted(known, asked, sorter=order), max(len(known) - 1, 0))]
    assert (known[found] == asked).all(), "lists that pipeline.validate would refuse"
    return np.asarray(found)


def _last_true(mask: BoolArray) -> IntArray:
    """Return for each place the last one up to it at which the mask holds."""
    return np.maximum.accumulate(np.where(mask, np.arange(len(mask)), 0))
