"""Where emulated ranks wait for each other, in one process or several: moments in shared memory.

Each number is written by one rank and read by others, alone, so no order between numbers matters.
"""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from pathlib import Path

import numpy as np

from flowtrain.costs.flops import FloatArray
from flowtrain.errors import StallError
from flowtrain.types.plan import Degrees

_TURNS = 4
"""A rank is at most one meeting ahead of another, and clears a number two meetings before it is used again."""
_RING = 256
"""Transfers that may be under way between two ranks."""
_SHORTEST_S, _LONGEST_S, _SHARE = 0.0002, 0.004, 0.1
"""A wait looks again after this share of the time that it has taken so far."""


class OtherRankFailedError(RuntimeError):
    """A wait for a rank that has failed, whose own error says why."""

    def __init__(self, text: str = "another emulated rank failed") -> None:  # the argument is for pickle
        super().__init__(text)


class Meeting(IntEnum):
    """The sorts of meetings; a rank meets the same ranks in all of one sort."""

    SHARDS = 0
    REPLICAS = 1
    WORLD = 2


class Meetings:
    """Meetings and transfers of all ranks. limit_s: longest wait for another rank.

    path: file of ``create_memory``; None: all ranks are in this process.
    """

    def __init__(self, degrees: Degrees, limit_s: float, path: Path | None = None) -> None:
        self._degrees, self._limit_s = degrees, limit_s
        if path is None:
            flat = np.full(_num_numbers(degrees), np.nan)
        else:
            with path.open("r+b") as file:
                flat = np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.float64)
        split = 1 + len(Meeting) * degrees.world_size * _TURNS
        self._failed = flat[:1]
        self._turns = flat[1:split].reshape(len(Meeting), degrees.world_size, _TURNS)
        self._rings = flat[split:].reshape(degrees.world_size, degrees.pp, _RING)
        self._met = np.zeros((len(Meeting), degrees.world_size), dtype=np.int64)
        self._sent = np.zeros((degrees.world_size, degrees.pp), dtype=np.int64)

    def meet(self, meeting: Meeting, rank: int, members: Sequence[int], at: float) -> float:
        """Meet the members, this rank among them, where it arrives at the moment ``at``; returns that of the last."""
        if len(members) == 1:
            return at
        turn = int(self._met[meeting, rank])
        self._met[meeting, rank] += 1
        mine = self._turns[meeting, rank]
        mine[(turn + 2) % _TURNS] = np.nan
        mine[turn % _TURNS] = at
        theirs, index = self._turns[meeting, :, turn % _TURNS], list(members)
        last = at

        def have_come() -> bool:
            nonlocal last
            last = float(theirs[index].max())  # nan if one is
            return not math.isnan(last)

        self._until(have_come, f"ranks {index} met rank {rank}")
        return last

    def send(self, rank: int, to_stage: int, arrives: float) -> None:
        """Announce that what this rank sends along its pipeline arrives at a moment."""
        number = int(self._sent[rank, to_stage])
        self._sent[rank, to_stage] += 1
        ring = self._rings[rank, to_stage]
        self._until(lambda: not _is_there(ring, number % _RING), f"rank {rank} could send to stage {to_stage}")
        ring[number % _RING] = arrives

    def receive(self, rank: int, from_stage: int, number: int) -> float:
        """Wait for a transfer from a stage of this rank's pipeline; returns the moment at which it arrives.

        number: how many came from there before it, in the order of their launches.
        """
        dp_rank, stage, tp_rank = self._degrees.coordinates(rank)
        ring = self._rings[self._degrees.rank(dp_rank, from_stage, tp_rank), stage]
        self._until(partial(_is_there, ring, number % _RING), f"stage {from_stage} sent to rank {rank}")
        arrives = float(ring[number % _RING])
        ring[number % _RING] = np.nan
        return arrives

    def fail(self) -> None:
        """End all waits, of all ranks."""
        self._failed[0] = 1.0

    def _until(self, is_ready: Callable[[], bool], what: str) -> None:
        started = time.monotonic()
        while not is_ready():
            waited = time.monotonic() - started
            if _is_there(self._failed, 0):
                raise OtherRankFailedError
            if waited > self._limit_s:
                raise StallError(f"emulated ranks: {waited:.0f} s passed before {what}")
            time.sleep(min(max(_SHORTEST_S, _SHARE * waited), _LONGEST_S))


def _is_there(numbers: FloatArray, index: int) -> bool:
    return not math.isnan(numbers[index])


def create_memory(path: Path, degrees: Degrees) -> None:
    """Create the file that ranks in several processes share."""
    np.full(_num_numbers(degrees), np.nan).tofile(path)


def _num_numbers(degrees: Degrees) -> int:
    return 1 + degrees.world_size * (len(Meeting) * _TURNS + degrees.pp * _RING)
