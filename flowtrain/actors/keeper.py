"""Keeps snapshots of a node's backbone ranks in memory, so that they outlive the ranks."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Protocol, TypeVar

import ray
from ray.actor import ActorHandle

from flowtrain.errors import CheckpointError
from flowtrain.mempool.memory_file import open_memory
from flowtrain.types.memory import MemoryFile

T = TypeVar("T")
ANSWER_S = 60.0
"""How long a keeper may take to answer; it only opens and closes files of memory."""


class SnapshotKeeper:
    """Holds the memory of the last complete snapshot of each rank, and of the one that is being taken."""

    def __init__(self) -> None:
        self._files: defaultdict[int, dict[int, MemoryFile]] = defaultdict(dict)  # by rank, by step

    def hold(self, rank: int, step: int, file: MemoryFile, complete: int | None) -> None:
        """Keep a rank's memory in place of all but its part of the snapshot after the step ``complete``.

        Raises CheckpointError if it cannot.
        """
        fd = open_memory(file)
        if isinstance(fd, str):
            raise CheckpointError(f"the node's keeper of snapshots cannot open the memory of rank {rank}: {fd}")
        files = self._files[rank]
        self._close(rank, [each for each in files if each == step or each != complete])
        files[step] = MemoryFile(os.getpid(), fd, file.name)

    def completed(self, step: int) -> None:
        """Note that all ranks' nodes keep this step; earlier ones are given up."""
        for rank, files in self._files.items():
            self._close(rank, [each for each in files if each < step])

    def steps(self) -> dict[int, tuple[int, ...]]:
        """Return the steps after which a rank's state is here, by rank."""
        return {rank: tuple(files) for rank, files in self._files.items()}

    def find(self, rank: int, step: int) -> MemoryFile | None:
        """Return where a rank's snapshot lies; None: not here."""
        return self._files[rank].get(step)

    def held_nbytes(self, rank: int) -> int:
        """Return the bytes that a rank's snapshots take."""
        return sum(os.fstat(file.fd).st_size for file in self._files[rank].values())

    def _close(self, rank: int, steps: list[int]) -> None:
        for step in steps:
            os.close(self._files[rank].pop(step).fd)


class Keeper(Protocol):
    """What a rank asks its node's keeper. Each raises CheckpointError."""

    def hold(self, rank: int, step: int, file: MemoryFile, complete: int | None) -> None:
        """See ``SnapshotKeeper``."""

    def find(self, rank: int, step: int) -> MemoryFile | None:
        """See ``SnapshotKeeper``."""

    def held_nbytes(self, rank: int) -> int:
        """See ``SnapshotKeeper``."""


class RayKeeper:
    """A ``SnapshotKeeper`` as a Ray actor."""

    def __init__(self, handle: ActorHandle) -> None:
        self._handle = handle

    def hold(self, rank: int, step: int, file: MemoryFile, complete: int | None) -> None:
        """See ``SnapshotKeeper``."""
        _answer(self._handle.hold.remote(rank, step, file, complete))

    def find(self, rank: int, step: int) -> MemoryFile | None:
        """See ``SnapshotKeeper``."""
        return _answer(self._handle.find.remote(rank, step))

    def held_nbytes(self, rank: int) -> int:
        """See ``SnapshotKeeper``."""
        return _answer(self._handle.held_nbytes.remote(rank))


def _answer(call: ray.ObjectRef[T]) -> T:
    try:
        return ray.get(call, timeout=ANSWER_S)
    except ray.exceptions.GetTimeoutError as error:
        raise CheckpointError(f"the node's keeper of snapshots did not answer within {ANSWER_S:g} s") from error
    except ray.exceptions.RayTaskError as error:
        raise CheckpointError(str(error.cause)) from error
    except ray.exceptions.RayError as error:
        raise CheckpointError("the node's keeper of snapshots died") from error
