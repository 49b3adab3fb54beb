"""Runs a program in virtual time: when each operation starts and ends.

A computation takes its seconds, a transfer starts when it is launched and those before it between the same two ranks
have arrived, ranks of a group leave a meeting together, and a rank does one operation after another. That is what the
executor, gloo and emulated devices do.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flowtrain.costs.flops import FloatArray, IntArray
from flowtrain.errors import ScheduleError
from flowtrain.scheduler.compiled import compiled
from flowtrain.simulator.checkpoint import Checkpoint, TimedOps
from flowtrain.simulator.program import Op, Program

NUM_SAVES = 16
"""A good number of saved states for lists that change again and again."""
NOT_YET = np.inf
"""The data of a fetch are not there, and nobody knows when they will be."""


class Timeline:
    """The times of one program.

    seconds: of each computation, ``[C]``. transfer_s: of each transfer, ``[X]``.
    ready_s: when the data of each fetch are there, ``[F]``; by default at once. ``NOT_YET``: ``deliver`` will say.
    begin_s: when each rank begins, ``[R]``; by default at 0.
    buffered: a send is over for its sender once it is launched, as where the transport copies; otherwise a transfer
        starts when both ends have launched it, as with NCCL.
    num_saves: states that are saved along the run, from which ``change`` and ``of_others`` may go on.
    resume: a state of lists that begin alike, from which this timeline goes on; ``begin_s`` then does not count.
    """

    def __init__(
        self,
        program: Program,
        seconds: FloatArray,
        transfer_s: FloatArray,
        *,
        ready_s: FloatArray | None = None,
        begin_s: FloatArray | None = None,
        buffered: bool = True,
        num_saves: int = 0,
        resume: Checkpoint | None = None,
    ) -> None:
        assert len(seconds) == len(program.computations) and len(transfer_s) == len(program.transfers)
        assert len(program.members) or Op.MEET not in program.op, "one replica alone meets nobody"
        self.program, self._buffered = program, buffered
        self._seconds, self._transfer_s = seconds.astype(np.float64), transfer_s.astype(np.float64)
        self._ready_s = np.zeros(len(program.fetches)) if ready_s is None else ready_s.astype(np.float64)
        num_ops, ranks = len(program.op), program.num_ranks
        self.starts, self.ends = np.zeros(num_ops), np.zeros(num_ops)
        self._floats = np.full(ranks + 3 * len(transfer_s) + len(program.group_first) - 1, np.nan)
        self._floats[:ranks] = 0.0 if begin_s is None else begin_s
        self._floats[ranks + 3 * len(transfer_s) :] = -np.inf
        self._ints = np.concatenate(
            [
                program.first[:-1],
                np.full(2 * len(transfer_s), -1),
                np.zeros(len(program.group_first) - 1, dtype=np.int64),
                np.arange(ranks)[::-1],
                [ranks],
            ]
        )
        self._saved_floats = np.empty((num_saves, len(self._floats)))
        self._saved_ints = np.empty((num_saves, len(self._ints)), dtype=np.int64)
        self._num_saved = 0
        if resume is not None:
            self._restore(resume)
        self._run()

    def _restore(self, saved: Checkpoint) -> None:
        """Go on from a state; ranks that waited in it come to their waits again."""
        ranks, program = self.program.num_ranks, self.program
        assert ranks == saved.program.num_ranks, (ranks, saved.program.num_ranks)
        self._floats[:ranks] = saved.clock_s
        self._floats[ranks : ranks + 3 * len(self._transfer_s)] = saved.transfers_of(program).reshape(-1)
        self._ints[:ranks] += saved.num_ops
        saved.put_times(program, self.starts, self.ends)

    def save(self, num_ops: IntArray | None = None) -> Checkpoint:
        """Return the latest saved state in which no rank has run more than its first ``num_ops``, ``[R]``; None: any.

        Later changes of this timeline do not touch it.
        """
        assert len(self._saved_ints), "num_saves is 0: nothing was saved to go on from"
        ranks, transfers = self.program.num_ranks, len(self._transfer_s)
        done = self._saved_ints[: self._num_saved, :ranks] - self.program.first[:-1]
        usable = len(done) if num_ops is None else int((done <= num_ops).all(axis=1).sum())
        floats = self._saved_floats[usable - 1]
        return Checkpoint(
            self.program,
            done[usable - 1].copy(),
            floats[:ranks].copy(),
            floats[ranks : ranks + 3 * transfers].reshape(3, transfers).copy(),
            self.starts.copy(),
            self.ends.copy(),
        )

    def of_others(
        self, program: Program, seconds: FloatArray, transfer_s: FloatArray, *, ready_s: FloatArray | None = None
    ) -> Timeline:
        """Return the timeline of other lists, as of a child in a tree search; what both begin with is not timed again.

        The ranks begin as in this timeline.
        """
        ready = np.zeros(len(program.fetches)) if ready_s is None else ready_s
        other = TimedOps(program, seconds, transfer_s, ready)
        mine = TimedOps(self.program, self._seconds, self._transfer_s, self._ready_s)
        saved = self.save(mine.num_shared(other))
        num_saves = len(self._saved_ints)
        return Timeline(
            program, seconds, transfer_s, ready_s=ready, buffered=self._buffered, num_saves=num_saves, resume=saved
        )

    def change(self, computations: IntArray, seconds: FloatArray) -> None:
        """Give computations other times; only what runs after the earliest of them is timed again."""
        assert len(self._saved_ints), "num_saves is 0: nothing was saved to go on from"
        self._seconds[computations] = seconds
        columns = self.program.computations
        at = self._saved_ints[: self._num_saved, columns.rank[computations]] <= columns.op[computations]
        usable = int(at.all(axis=1).sum()) - 1  # a later state has passed all that an earlier one has
        self._num_saved = usable
        self._floats[:] = self._saved_floats[usable]
        self._ints[:] = self._saved_ints[usable]
        self._run()

    def deliver(self, fetches: IntArray, ready_s: float) -> bool:
        """Let the data of fetches be there from ``ready_s`` on; returns whether a rank waited for them, and went on."""
        self._ready_s[fetches] = ready_s
        ranks = self.program.fetches.rank[fetches]
        going_on = ranks[self._waits_at(ranks) == fetches]
        if not len(going_on):
            return False
        num_ranks = self.program.num_ranks
        stack = self._ints[len(self._ints) - 1 - num_ranks : -1]
        stack[: len(going_on)] = going_on
        self._ints[-1] = len(going_on)
        self._run()
        return True

    def _waits_at(self, ranks: IntArray) -> IntArray:
        """The fetch that each rank does next; -1 if it does something else next, or is done."""
        program = self.program
        at = np.minimum(self.reached[ranks], len(program.op) - 1)
        is_own = self.reached[ranks] < program.first[ranks + 1]
        return np.where(is_own & (program.op[at] == Op.FETCH), program.index[at], -1)

    @property
    def reached(self) -> IntArray:
        """The operation that each rank does next, or the first one of the next rank if it is done, ``[R]``."""
        return self._ints[: self.program.num_ranks]

    @property
    def is_done(self) -> bool:
        """Whether all ranks have run to their end; otherwise some wait for data that are not there yet."""
        return bool((self.reached == self.program.first[1:]).all())

    def _run(self) -> None:
        program = self.program
        self._num_saved = _advance(
            program.first,
            program.op,
            program.index,
            self._seconds,
            self._transfer_s,
            self._ready_s,
            program.transfers.lane_start,
            program.group_first,
            program.members,
            self._buffered,
            self.starts,
            self.ends,
            self._floats,
            self._ints,
            self._saved_floats,
            self._saved_ints,
            self._num_saved,
        )
        waiting = np.flatnonzero(self.reached != program.first[1:])
        if len(waiting) and (self._waits_at(waiting) < 0).all():
            who = waiting.tolist()
            raise ScheduleError(f"ranks {who} wait for each other for ever; check the lists with pipeline.validate")

    @property
    def finish_s(self) -> FloatArray:
        """When each rank is done, ``[R]``."""
        return self._floats[: self.program.num_ranks].copy()

    @property
    def makespan_s(self) -> float:
        """When the last rank is done."""
        return float(self.finish_s.max())

    @property
    def busy_s(self) -> FloatArray:
        """Seconds that each rank computes, ``[R]``."""
        return np.bincount(self.program.computations.rank, self._seconds, self.program.num_ranks).astype(np.float64)


@compiled
def _arrive(
    which: int,
    lane_start: int,
    transfer_s: FloatArray,
    sent: FloatArray,
    launched: FloatArray,
    arrived: FloatArray,
    buffered: bool,
) -> None:
    """Set when a transfer arrives, and those before it between the same two ranks."""
    due = which
    while due > lane_start and np.isnan(arrived[due - 1]):
        due -= 1
    while due <= which:
        begins = sent[due] if buffered else max(sent[due], launched[due])
        if due > lane_start:
            begins = max(begins, arrived[due - 1])
        arrived[due] = begins + transfer_s[due]
        due += 1


@compiled
def _advance(
    first: IntArray,
    op: NDArray[np.int8],
    index: IntArray,
    seconds: FloatArray,
    transfer_s: FloatArray,
    ready_s: FloatArray,
    lane_start: IntArray,
    group_first: IntArray,
    members: IntArray,
    buffered: bool,
    starts: FloatArray,
    ends: FloatArray,
    floats: FloatArray,
    ints: IntArray,
    saved_floats: FloatArray,
    saved_ints: IntArray,
    num_saved: int,
) -> int:
    """Run until no rank can go on, saving the state now and then; returns the number of saved states.

    A rank runs until it must wait; what it waits for puts it back on the stack. Times do not depend on that order.
    """
    ranks, transfers, groups = len(first) - 1, len(transfer_s), len(group_first) - 1
    clock = floats[:ranks]
    sent = floats[ranks : ranks + transfers]
    launched = floats[ranks + transfers : ranks + 2 * transfers]
    arrived = floats[ranks + 2 * transfers : ranks + 3 * transfers]
    latest = floats[ranks + 3 * transfers :]
    at = ints[:ranks]
    receiver = ints[ranks : ranks + transfers]
    sender = ints[ranks + transfers : ranks + 2 * transfers]
    come = ints[ranks + 2 * transfers : ranks + 2 * transfers + groups]
    stack = ints[ranks + 2 * transfers + groups : -1]
    depth = ints[-1]
    every = len(op) // max(len(saved_floats), 1) + 1
    since = every
    while depth > 0:
        if since >= every and num_saved < len(saved_floats):
            ints[-1] = depth
            saved_floats[num_saved] = floats
            saved_ints[num_saved] = ints
            num_saved += 1
            since = 0
        depth -= 1
        rank = stack[depth]
        now, number = clock[rank], at[rank]
        begun = number
        while number < first[rank + 1]:
            kind, which = op[number], index[number]
            starts[number] = now
            if kind == 0:
                now += seconds[which]
            elif kind == 1:
                sent[which] = now
                if receiver[which] >= 0:
                    stack[depth] = receiver[which]
                    depth += 1
                    receiver[which] = -1
            elif kind == 2:
                launched[which] = now
                if sender[which] >= 0:
                    stack[depth] = sender[which]
                    depth += 1
                    sender[which] = -1
            elif kind == 4 or (kind == 3 and not buffered):
                if np.isnan(sent[which]):
                    receiver[which] = rank
                    break
                if np.isnan(launched[which]) and not buffered:
                    sender[which] = rank
                    break
                _arrive(which, lane_start[which], transfer_s, sent, launched, arrived, buffered)
                now = max(now, arrived[which])
            elif kind == 5:
                latest[which] = max(latest[which], now)
                come[which] += 1
                if come[which] < group_first[which + 1] - group_first[which]:
                    break
                now = latest[which]
                for other in members[group_first[which] : group_first[which + 1]]:
                    if other != rank:
                        ends[at[other]] = now
                        at[other] += 1
                        clock[other] = now
                        stack[depth] = other
                        depth += 1
                come[which] = 0
                latest[which] = -np.inf
            elif kind == 6:
                if ready_s[which] == np.inf:
                    break
                now = max(now, ready_s[which])
            ends[number] = now
            number += 1
        since += number - begun
        at[rank] = number
        clock[rank] = now
    ints[-1] = depth
    return num_saved
