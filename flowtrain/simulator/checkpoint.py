"""The state of a timeline part of the way, from which other lists that begin alike go on (PipeWeaver 4.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowtrain.costs.flops import FloatArray, IntArray
from flowtrain.scheduler.compiled import compiled
from flowtrain.simulator.program import Program


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """When the first operations of each rank ran."""

    program: Program
    num_ops: IntArray
    """Operations of each rank that have ended, ``[R]``."""
    clock_s: FloatArray
    """When each rank has come so far, ``[R]``."""
    transfers_s: FloatArray
    """When each transfer was sent, launched by its receiver, and arrived, ``[3, X]``; NaN if that is not yet known."""
    starts: FloatArray
    """Of the program's operations, ``[N]``; those that have not ended do not count."""
    ends: FloatArray

    def put_times(self, program: Program, starts: FloatArray, ends: FloatArray) -> None:
        """Set the times of the operations that have ended, by their numbers in another program."""
        own, other = self.program.first.tolist(), program.first.tolist()
        for rank, count in enumerate(self.num_ops.tolist()):
            here, there = slice(other[rank], other[rank] + count), slice(own[rank], own[rank] + count)
            starts[here], ends[here] = self.starts[there], self.ends[there]

    def transfers_of(self, program: Program) -> FloatArray:
        """Return ``transfers_s`` by the numbers of another program: the i-th between two ranks is the i-th there."""
        found = np.full((3, len(program.transfers)), np.nan)
        known = np.flatnonzero(~np.isnan(self.transfers_s).all(axis=0))
        if len(known):
            pairs, first = _lanes(program)
            mine = self.program.transfers
            lane = np.searchsorted(pairs, mine.source[known] * program.num_ranks + mine.destination[known])
            found[:, first[lane] + known - mine.lane_start[known]] = self.transfers_s[:, known]
        return found


def _lanes(program: Program) -> tuple[IntArray, IntArray]:
    """A number for each pair of ranks with transfers, sorted, and the first transfer of each."""
    moved = program.transfers
    first = np.flatnonzero(moved.lane_start == np.arange(len(moved)))
    pairs = moved.source[first] * program.num_ranks + moved.destination[first]
    order = np.argsort(pairs)
    return pairs[order], first[order]


@dataclass(frozen=True, slots=True, eq=False)
class TimedOps:
    """A program with the time of each operation."""

    program: Program
    seconds: FloatArray
    transfer_s: FloatArray
    ready_s: FloatArray

    def num_shared(self, other: TimedOps) -> IntArray:
        """Return how many operations each rank runs first in both programs, with the same times; ``[R]``."""
        return _num_shared(*self._columns(), *other._columns())

    def _columns(self) -> tuple[NDArray[Any], ...]:
        """What tells operations apart, in terms that do not depend on the rest of the lists."""
        program, done, moved = self.program, self.program.computations, self.program.transfers
        computed = np.stack([done.place, done.microbatch, done.part, done.is_backward])
        sent = np.stack([moved.source, moved.destination, moved.lane_start])
        times = self.seconds, self.transfer_s, self.ready_s
        return program.first, program.op, program.index, computed, sent, program.fetches.microbatch, *times


@compiled
def _num_shared(
    first: IntArray,
    op: NDArray[np.int8],
    index: IntArray,
    computed: IntArray,
    sent: IntArray,
    fetched: IntArray,
    seconds: FloatArray,
    transfer_s: FloatArray,
    ready_s: FloatArray,
    other_first: IntArray,
    other_op: NDArray[np.int8],
    other_index: IntArray,
    other_computed: IntArray,
    other_sent: IntArray,
    other_fetched: IntArray,
    other_seconds: FloatArray,
    other_transfer_s: FloatArray,
    other_ready_s: FloatArray,
) -> IntArray:
    shared = np.zeros(len(first) - 1, dtype=np.int64)
    for rank in range(len(shared)):
        count = min(first[rank + 1] - first[rank], other_first[rank + 1] - other_first[rank])
        while shared[rank] < count:
            number, other = first[rank] + shared[rank], other_first[rank] + shared[rank]
            kind, one, two = op[number], index[number], other_index[other]
            if kind != other_op[other]:
                break
            if kind == 0:
                same = seconds[one] == other_seconds[two]
                for row in range(4):
                    same = same and computed[row, one] == other_computed[row, two]
            elif kind < 5:
                same = transfer_s[one] == other_transfer_s[two]
                same = same and sent[0, one] == other_sent[0, two] and sent[1, one] == other_sent[1, two]
                same = same and one - sent[2, one] == two - other_sent[2, two]
            elif kind == 6:
                same = fetched[one] == other_fetched[two] and ready_s[one] == other_ready_s[two]
            else:
                same = one == two
            if not same:
                break
            shared[rank] += 1
    return shared
