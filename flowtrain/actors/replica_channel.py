"""Messages between the ranks of a data parallel replica, whose leader alone asks the coordinator."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

T = TypeVar("T")

COLLECTIVE_MARGIN_S = 60.0
"""Ranks wait this much longer for each other than their leader waits for data, which then reports what it waits for."""
_FRAME_NBYTES, _MOST_NBYTES = 1 << 15, 1 << 20
"""Of the first frame, and of the largest: what a collective costs is the call, not so few bytes."""
_LENGTH_NBYTES = 8


class ReplicaChannel(ABC):
    """Connects one thread of each rank of a replica. All of them call the same methods in the same order.

    rank: place in the replica; the leader has 0.
    size: ranks of the replica.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    @property
    def is_leader(self) -> bool:
        """Whether this rank asks the coordinator."""
        return self.rank == 0

    @abstractmethod
    def share(self, message: Any = None) -> Any:
        """Return the leader's message on every rank; the others' arguments are ignored."""

    @abstractmethod
    def collect(self, value: T) -> list[T] | None:
        """Return all ranks' values at the leader, in the order of the ranks; None on the others."""

    @abstractmethod
    def highest(self, value: int) -> int:
        """Return the highest value of all ranks on every rank."""

    def lead(self, action: Callable[[], T]) -> T:
        """Let the leader act; every rank returns its result, or raises its error."""
        outcome: tuple[T | None, BaseException | None] = (None, None)
        if self.is_leader:
            try:
                outcome = (action(), None)
            except Exception as error:
                outcome = (None, portable(error))
        result, failure = self.share(outcome)
        if failure is not None:
            raise failure
        return cast(T, result)


class Alone(ReplicaChannel):
    """The channel of a replica of one rank: there is nobody to talk to."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)

    def share(self, message: Any = None) -> Any:
        """See ``ReplicaChannel``."""
        return message

    def collect(self, value: T) -> list[T] | None:
        """See ``ReplicaChannel``."""
        return [value]

    def highest(self, value: int) -> int:
        """See ``ReplicaChannel``."""
        return value


class GlooChannel(ReplicaChannel):
    """A channel over a gloo group of the replica's ranks, which no other thread uses.

    When a rank has ended, the others' calls raise RuntimeError at once; when it hangs, after the group's time limit.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self._group = group
        self._size_frame(_FRAME_NBYTES)

    def share(self, message: Any = None) -> Any:
        """See ``ReplicaChannel``."""
        # torch's broadcast of objects takes two collectives and twice the processor's time, whatever the length.
        # One that does not fit takes a second one; the frame then grows, on all ranks, and fits the next such message.
        room = len(self._body)
        if self.is_leader:
            data = np.frombuffer(pickle.dumps(message), dtype=np.uint8)
            self._length[0] = len(data)
            self._body[: len(data)] = data[:room]
        self._broadcast(self._frame)
        nbytes = int(self._length[0])
        rest = data[room:].copy() if self.is_leader else np.empty(max(0, nbytes - room), dtype=np.uint8)
        if len(rest):
            self._broadcast(rest)
        shared = message if self.is_leader else pickle.loads(self._body[:nbytes].tobytes() + rest.tobytes())
        while _LENGTH_NBYTES + nbytes > len(self._frame) < _MOST_NBYTES:
            self._size_frame(2 * len(self._frame))
        return shared

    def _size_frame(self, nbytes: int) -> None:
        self._frame = np.zeros(nbytes, dtype=np.uint8)
        self._length, self._body = self._frame[:_LENGTH_NBYTES].view(np.int64), self._frame[_LENGTH_NBYTES:]

    def _broadcast(self, data: NDArray[np.uint8]) -> None:
        """Fill the array of every rank with the leader's."""
        dist.broadcast(torch.from_numpy(data), group=self._group, group_src=0)

    def collect(self, value: T) -> list[T] | None:
        """See ``ReplicaChannel``."""
        values: list[Any] | None = [None] * self.size if self.is_leader else None
        dist.gather_object(value, values, group=self._group, group_dst=0)
        return values

    def highest(self, value: int) -> int:
        """See ``ReplicaChannel``."""
        found = torch.tensor([value])
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return int(found)


def channel_of(group: dist.ProcessGroup | None) -> ReplicaChannel:
    """Return a replica's channel over a group; None: the replica has one rank."""
    return Alone() if group is None else GlooChannel(group)


def portable(error: BaseException) -> BaseException:
    """Return an error that another process can raise: itself, or its description if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
