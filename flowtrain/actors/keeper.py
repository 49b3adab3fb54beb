"""Keeps snapshots of a node's backbone ranks in memory, so that they outlive the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol, TypeVar

import ray
from ray.actor import ActorHandle

from flowtrain.errors import SnapshotLostError
from flowtrain.mempool.memory_file import open_memory
from flowtrain.types.memory import MemoryFile

T = TypeVar("T")
ANSWER_S = 60.0
"""How long a keeper may take to answer; it only opens and closes files of memory."""


class SnapshotKeeper:
    """Holds the memory of the last complete snapshot of each rank, and of the one that is being taken."""

    def __init__(self) -> None:
        self._files: dict[int, dict[int, MemoryFile]] = {}  # by rank, by step

    def make_room(self, rank: int, complete: int | None) -> None:
        """Close all memory of a rank but that of the step ``complete``."""
        self._close(rank, lambda step: step != complete)

    def hold(self, rank: int, step: int, file: MemoryFile) -> None:
        """Keep a rank's memory of a step. Raises SnapshotLostError if it cannot."""
        fd = open_memory(file)
        if isinstance(fd, str):
            raise SnapshotLostError(f"the node's keeper of snapshots cannot open the memory of rank {rank}: {fd}")
        self._close(rank, lambda each: each == step)
        self._files.setdefault(rank, {})[step] = MemoryFile(os.getpid(), fd, file.name)

    def completed(self, step: int) -> None:
        """Close the memory of earlier steps: all ranks have this one."""
        for rank in self._files:
            self._close(rank, lambda each: each < step)

    def keep_only(self, step: int | None) -> None:
        """Close the memory of all other steps, which are done again."""
        for rank in self._files:
            self.make_room(rank, step)

    def steps(self) -> dict[int, tuple[int, ...]]:
        """Return the steps after which a rank's state is here, by rank."""
        return {rank: tuple(files) for rank, files in self._files.items()}

    def find(self, rank: int, step: int) -> MemoryFile | None:
        """Return where a rank's snapshot lies; None: not here."""
        return self._files.get(rank, {}).get(step)

    def _close(self, rank: int, is_closed: Callable[[int], bool]) -> None:
        files = self._files.get(rank, {})
        for step in [each for each in files if is_closed(each)]:
            os.close(files.pop(step).fd)


class Keeper(Protocol):
    """What a rank asks its node's keeper, see ``SnapshotKeeper``. Each method raises SnapshotLostError."""

    def make_room(self, rank: int, complete: int | None) -> None:
        """Close all memory of a rank but that of the step ``complete``."""

    def hold(self, rank: int, step: int, file: MemoryFile) -> None:
        """Keep a rank's memory of a step."""

    def find(self, rank: int, step: int) -> MemoryFile | None:
        """Return where a rank's snapshot lies; None: not here."""


class RayKeeper:
    """A ``SnapshotKeeper`` as a Ray actor."""

    def __init__(self, handle: ActorHandle) -> None:
        self._handle = handle

    def make_room(self, rank: int, complete: int | None) -> None:
        """See ``Keeper``."""
        _answer(self._handle.make_room.remote(rank, complete))

    def hold(self, rank: int, step: int, file: MemoryFile) -> None:
        """See ``Keeper``."""
        _answer(self._handle.hold.remote(rank, step, file))

    def find(self, rank: int, step: int) -> MemoryFile | None:
        """See ``Keeper``."""
        return _answer(self._handle.find.remote(rank, step))


def _answer(call: ray.ObjectRef[T]) -> T:
    try:
        return ray.get(call, timeout=ANSWER_S)
    except ray.exceptions.GetTimeoutError as error:
        raise SnapshotLostError(f"the node's keeper of snapshots did not answer within {ANSWER_S:g} s") from error
    except ray.exceptions.RayTaskError as error:
        raise SnapshotLostError(str(error.cause)) from error
    except ray.exceptions.RayError as error:
        raise SnapshotLostError("the node's keeper of snapshots died") from error
