"""What every transport can do: bring the bytes of resolved extents here."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from flowtrain.errors import PoolError
from flowtrain.mempool.page_table import Mapping, SegmentKey


class Distance(enum.StrEnum):
    """How far apart the owner of the bytes and their reader are."""

    SAME_PROCESS = "same_process"
    SAME_NODE = "same_node"
    OTHER_NODE = "other_node"


class Transport(ABC):
    """One way to read pool memory. Thread-safe; extents reach it already resolved by the page table."""

    name: ClassVar[str]

    @abstractmethod
    def view(self, source: Mapping) -> np.ndarray | None:
        """Return the bytes as a read-only uint8 array without copying; None where this transport can only copy.

        Raises OwnerLostError if the owner is gone and its memory with it.
        """

    def read_into(self, sources: Sequence[Mapping], destination: np.ndarray) -> None:
        """Copy the bytes of ``sources``, one after another, into ``destination`` (uint8, as long as their sum).

        A batch is one call, so that a network transport can make one transfer of it.
        """
        start = 0
        for source in sources:
            view = self.view(source)
            assert view is not None, f"transport {self.name} has no views and must bring its own read_into"
            destination[start : start + source.nbytes] = view
            start += source.nbytes
        if start != len(destination):
            raise PoolError(f"{start} bytes were read into a destination of {len(destination)}")

    def drop(self, segment: SegmentKey) -> None:  # noqa: B027 - most transports keep nothing per segment
        """Let go of a segment whose owner is gone."""

    def close(self) -> None:  # noqa: B027 - most transports keep nothing open
        """Let go of everything."""
