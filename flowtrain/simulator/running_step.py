"""A step that is trained while its data still arrive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from flowtrain.costs.flops import FloatArray, IntArray
from flowtrain.simulator.engine import Timeline
from flowtrain.simulator.program import Program


@dataclass(frozen=True, slots=True, eq=False)
class DataNeeds:
    """Where a program needs data; every rank takes each microbatch of its replica once, in their order."""

    program: Program
    fetches: IntArray
    """Of each replica, slot and pipeline rank, ``[dp, K, pp]``."""
    leader_ops: IntArray
    """The operation with which each replica's first rank takes each slot, ``[dp, K]``."""

    @classmethod
    def of(cls, program: Program) -> DataNeeds:
        """Find them in a program."""
        dp, pp = program.num_replicas, program.num_ranks // program.num_replicas
        columns = program.fetches
        fetches = np.lexsort((columns.rank % pp, columns.microbatch, columns.rank // pp)).reshape(dp, -1, pp)
        return cls(program, fetches, program.fetch_ops[fetches[:, :, 0]])


class RunningStep:
    """Times of a step, as far as its data are there.

    begin_s: when all ranks begin.
    ready_s: when each slot of each replica was read, ``[dp, K]``; ``NOT_YET``: it was not.
    Other arguments are those of ``Timeline``.
    """

    def __init__(
        self,
        needs: DataNeeds,
        seconds: FloatArray,
        transfer_s: FloatArray,
        *,
        begin_s: float,
        ready_s: FloatArray,
        buffered: bool,
    ) -> None:
        program = needs.program
        each_ready_s = np.empty(len(program.fetches))
        each_ready_s[needs.fetches] = ready_s[:, :, None]
        self.begin_s = begin_s
        self.timeline = Timeline(
            program,
            seconds,
            transfer_s,
            ready_s=each_ready_s,
            begin_s=np.full(program.num_ranks, begin_s),
            buffered=buffered,
        )
        self._needs = needs
        self._num_taken = np.zeros(program.num_replicas, dtype=np.int64)

    def deliver(self, read: Sequence[tuple[int, tuple[int, ...]]], now_s: float) -> bool:
        """Let data be there from now on: (replica, slots). Returns whether a rank waited for them."""
        fetches = self._needs.fetches
        found = [fetches[replica, list(slots)].reshape(-1) for replica, slots in read]
        return self.timeline.deliver(np.concatenate(found), now_s)

    def newly_taken(self) -> Iterator[tuple[int, list[float]]]:
        """Yield each replica whose first rank takes further slots, and when it takes them."""
        needs, reached = self._needs, self.timeline.reached
        pp = needs.fetches.shape[2]
        before, self._num_taken = self._num_taken, (needs.leader_ops < reached[::pp, None]).sum(axis=1)
        for replica in np.flatnonzero(self._num_taken > before).tolist():
            ops = needs.leader_ops[replica, before[replica] : self._num_taken[replica]]
            yield replica, self.timeline.ends[ops].tolist()
