"""The ranks of a replica as threads of one process: their channel, and the exchange of feature shares."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import torch

from flowtrain.actors.replica_channel import ReplicaChannel

T = TypeVar("T")


class ThreadReplica:
    """Where the threads of one channel meet. limit_s: longest wait for the others."""

    def __init__(self, size: int, limit_s: float) -> None:
        self.size = size
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=limit_s)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        self._values[rank] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found

    def complete(self, rank: int, data: torch.Tensor, piece: int) -> None:
        """See ``BackboneGroup.exchange``."""
        pieces = [each.split(piece) for each in self.exchange(rank, data)]
        filled = torch.cat([pieces[number % self.size][number] for number in range(len(pieces[0]))])
        self.exchange(rank, None)  # all have read
        data.copy_(filled)

    def abort(self) -> None:
        """Stop all waits for a rank that failed."""
        self._barrier.abort()


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
