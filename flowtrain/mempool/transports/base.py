"""The interface of all transports: they bring the bytes of resolved extents to this process."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from flowtrain.errors import PoolError
from flowtrain.mempool.page_table import Mapping, SegmentKey

if TYPE_CHECKING:
    from torch import Tensor


class Distance(enum.StrEnum):
    """Distance between the owner of the bytes and their reader."""

    SAME_PROCESS = "same_process"
    SAME_NODE = "same_node"
    PRIVATE = "private"
    """Of the same node, which gives bytes over a socket and maps no memory."""
    OTHER_NODE = "other_node"


class Arrival(ABC):
    """A read in progress. If it is dropped unread, it gives back its buffers."""

    @abstractmethod
    def wait(self) -> list[np.ndarray]:
        """Wait, and return the bytes of each source, uint8, read-only. Call it once. Raises OwnerLostError."""


class Arrived(Arrival):
    """A read that is complete already."""

    def __init__(self, data: list[np.ndarray]) -> None:
        self._data = data

    def wait(self) -> list[np.ndarray]:
        """Return the bytes."""
        return self._data


class Transport(ABC):
    """One way to read pool memory. Thread-safe. Its sources are extents that the page table has resolved."""

    name: ClassVar[str]

    @abstractmethod
    def view(self, source: Mapping) -> np.ndarray | None:
        """Return the bytes as a read-only uint8 array without copying; None if this transport can only copy.

        Raises OwnerLostError if the owner is gone and its memory with it.
        """

    def read(self, sources: Sequence[Mapping]) -> list[np.ndarray]:
        """Return the bytes of each source, as ``view`` does. A batch is one call, so that a network makes one transfer.

        Raises OwnerLostError as ``view``.
        """
        views = [self.view(source) for source in sources]
        assert all(view is not None for view in views), f"transport {self.name} has no views and no read of its own"
        return [view for view in views if view is not None]

    def start(self, sources: Sequence[Mapping]) -> Arrival:
        """As ``read``, but a network only starts its transfer, so that the caller can work in the meantime."""
        return Arrived(self.read(sources))

    def scatter(self, sources: Sequence[Mapping], destinations: Sequence[np.ndarray]) -> None:
        """Copy the bytes of each source into its destination, uint8 of the same length. A batch is one call."""
        for data, destination in zip(self.read(sources), destinations, strict=True):
            destination[:] = data

    def copy(self, sources: Sequence[Mapping], destinations: Sequence[Tensor]) -> None:
        """Copy each source into its destination on a device, uint8 of the same length; complete when this returns."""
        raise PoolError(f"transport {self.name} does not write device memory")

    def read_into(self, sources: Sequence[Mapping], destination: np.ndarray) -> None:
        """Copy the bytes of ``sources``, one after another, into ``destination`` (uint8, of their total length)."""
        nbytes = sum(source.nbytes for source in sources)
        if nbytes != len(destination):
            raise PoolError(f"{nbytes} bytes were read into a destination of {len(destination)}")
        self.scatter(sources, slices(destination, [source.nbytes for source in sources]))

    def drop(self, segment: SegmentKey) -> None:  # noqa: B027 - most transports keep nothing per segment
        """Let go of a segment whose owner is gone."""

    def close(self) -> None:  # noqa: B027 - most transports keep nothing open
        """Let go of everything."""


def slices(destination: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    """Cut an array into runs of these lengths, one after another."""
    ends = list(accumulate(lengths))
    return [destination[end - length : end] for end, length in zip(ends, lengths, strict=True)]
