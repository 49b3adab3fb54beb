"""The ranks of a replica as threads of one process: their channel, and the exchange of feature shares."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import torch

from flowtrain.actors.replica_channel import ReplicaChannel
from flowtrain.emulation.meetings import OtherRankFailedError
from flowtrain.errors import StallError

T = TypeVar("T")


class ThreadReplica:
    """Where the threads of one channel meet. limit_s: longest wait for the others."""

    def __init__(self, size: int, limit_s: float) -> None:
        self.size = size
        self._values: list[Any] = [None] * size
        self._limit_s, self._is_aborted = limit_s, False
        self._barrier = threading.Barrier(size, timeout=limit_s)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        self._values[rank] = value
        self._meet()
        found = list(self._values)
        self._meet()
        return found

    def complete(self, rank: int, data: torch.Tensor, piece: int) -> None:
        """See ``BackboneGroup.exchange``."""
        pieces = [each.split(piece) for each in self.exchange(rank, data)]
        filled = torch.cat([pieces[number % self.size][number] for number in range(len(pieces[0]))])
        self.exchange(rank, None)  # all have read
        data.copy_(filled)

    def abort(self) -> None:
        """Stop all waits for a rank that failed."""
        self._is_aborted = True
        self._barrier.abort()

    def _meet(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            if self._is_aborted:
                raise OtherRankFailedError from error
            raise StallError(
                f"emulated ranks: {self._limit_s:.0f} s passed before all {self.size} of a replica met"
            ) from error


class ThreadChannel(ReplicaChannel):
    """One rank's end of a channel."""

    def __init__(self, rank: int, replica: ThreadReplica) -> None:
        super().__init__(rank, replica.size)
        self._replica = replica

    def share(self, message: Any = None) -> Any:
        """See ``ReplicaChannel``."""
        return self._replica.exchange(self.rank, message)[0]

    def collect(self, value: T) -> list[T] | None:
        """See ``ReplicaChannel``."""
        values = self._replica.exchange(self.rank, value)
        return values if self.is_leader else None

    def highest(self, value: int) -> int:
        """See ``ReplicaChannel``."""
        return int(max(self._replica.exchange(self.rank, value)))
