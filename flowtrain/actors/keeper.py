"""Keeps snapshots of a node's backbone ranks in memory, and copies of another node's, so that they outlive both."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import ray
from ray.actor import ActorHandle

from flowtrain.errors import SnapshotLostError
from flowtrain.mempool.host import HOST_MEMORY_SHARE, host_memory
from flowtrain.mempool.memory_file import open_memory
from flowtrain.types.memory import MemoryFile

T = TypeVar("T")
ANSWER_S = 60.0
"""How long a keeper may take to answer; it only opens, closes and reads files of memory."""
NUM_THREADS = 4
"""Of a keeper's actor: ranks are answered while it copies."""
_MOST_LATER = 8
"""Keepers of a node that may be lost between two questions."""
_CHUNK_NBYTES = 32 << 20
_CHUNKS_AHEAD = 4


class SnapshotKeeper:
    """Holds the memory of the last complete snapshot of each rank, and of the one that is being taken. Thread-safe."""

    def __init__(self) -> None:
        self._files: dict[int, dict[int, MemoryFile]] = {}  # by rank, by step
        self._lock = threading.RLock()
        self._num_cuts = 0
        self._open: dict[int, int] = {}  # by rank, the step that it gave last, until the driver says it is complete

    def is_free(self, rank: int) -> bool:
        """Whether a rank may give another snapshot: its last one is complete, and copied to another node."""
        with self._lock:
            return rank not in self._open

    def make_room(self, rank: int, complete: int | None) -> None:
        """Close all memory of a rank but that of the step ``complete``."""
        self._close(rank, lambda step: step != complete)

    def hold(self, rank: int, step: int, file: MemoryFile) -> None:
        """Keep a rank's memory of a step. Raises SnapshotLostError if it cannot."""
        fd = open_memory(file)
        if isinstance(fd, str):
            raise SnapshotLostError(f"the node's keeper of snapshots cannot open the memory of rank {rank}: {fd}")
        with self._lock:
            self._put(rank, step, MemoryFile(os.getpid(), fd, file.name))
            self._open[rank] = step

    def give_up(self, rank: int, step: int) -> None:
        """Close a rank's memory of a step, which other ranks could not give."""
        with self._lock:
            self._close(rank, lambda each: each == step)
            self._open.pop(rank, None)

    def completed(self, step: int) -> None:
        """Close the memory of earlier steps: all ranks have this one."""
        with self._lock:
            self._open = {rank: last for rank, last in self._open.items() if last > step}
            for rank in self._files:
                self._close(rank, lambda each: each < step)

    def keep_only(self, step: int | None) -> None:
        """Close the memory of all other steps, which are done again; what is being copied now is not kept."""
        with self._lock:
            self._num_cuts += 1
            self._open = {}
            for rank in self._files:
                self.make_room(rank, step)

    def steps(self) -> dict[int, tuple[int, ...]]:
        """Return the steps after which a rank's state is here, by rank."""
        with self._lock:
            return {rank: tuple(files) for rank, files in self._files.items()}

    def find(self, rank: int, step: int) -> MemoryFile | None:
        """Return where a rank's snapshot lies; None: not here."""
        with self._lock:
            return self._files.get(rank, {}).get(step)

    def copy(self, source: Keeper, ranks: Sequence[int], step: int) -> None:
        """Copy what another node's keeper holds of some ranks. Raises SnapshotLostError."""
        num_cuts = self._num_cuts
        for rank in ranks:
            if self.find(rank, step) is not None:
                continue
            file = _copied(source, rank, step)
            with self._lock:
                if num_cuts != self._num_cuts:
                    os.close(file.fd)
                    raise SnapshotLostError(f"the run went back while the snapshot of step {step} was copied")
                self._put(rank, step, file)

    def describe(self, rank: int, step: int) -> tuple[str, int]:
        """Return the name of a snapshot's memory, and its bytes. Raises SnapshotLostError if it is not here."""
        with self._lock:
            file = self._found(rank, step)
            return file.name, os.fstat(file.fd).st_size

    def read(self, rank: int, step: int, offset: int, nbytes: int) -> bytes:
        """Return part of a snapshot. Raises SnapshotLostError if it is not here any more."""
        with self._lock:
            fd = os.dup(self._found(rank, step).fd)  # the memory may be closed meanwhile
        try:
            return os.pread(fd, nbytes, offset)
        finally:
            os.close(fd)

    def _found(self, rank: int, step: int) -> MemoryFile:
        file = self.find(rank, step)
        if file is None:
            raise SnapshotLostError(f"the snapshot of rank {rank} after step {step} is not there any more")
        return file

    def _put(self, rank: int, step: int, file: MemoryFile) -> None:
        with self._lock:
            self._close(rank, lambda each: each == step)
            self._files.setdefault(rank, {})[step] = file

    def _close(self, rank: int, is_closed: Callable[[int], bool]) -> None:
        with self._lock:
            files = self._files.get(rank, {})
            for step in [each for each in files if is_closed(each)]:
                os.close(files.pop(step).fd)


def _copied(source: Keeper, rank: int, step: int) -> MemoryFile:
    """Copy a rank's snapshot into new memory of this process."""
    name, nbytes = source.describe(rank, step)
    free = host_memory().available_nbytes
    if nbytes > HOST_MEMORY_SHARE * free:
        raise SnapshotLostError(
            f"a copy of rank {rank}'s snapshot needs {nbytes:,} bytes, more than half of the {free:,} bytes of memory "
            "that are free there"
        )
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        with os.fdopen(fd, "wb", closefd=False) as memory:
            for chunk in source.chunks(rank, step, nbytes):
                memory.write(chunk)
        if (found := os.fstat(fd).st_size) != nbytes:
            raise SnapshotLostError(f"{found:,} of {nbytes:,} bytes of rank {rank}'s snapshot were copied")
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError):
            raise SnapshotLostError(f"a copy of rank {rank}'s snapshot cannot be written: {error}") from error
        raise
    return MemoryFile(os.getpid(), fd, name)


class Keeper(Protocol):
    """What a rank, or another node's keeper, asks a ``SnapshotKeeper``. Each method raises SnapshotLostError."""

    def is_free(self, rank: int) -> bool:
        """Whether a rank may give another snapshot."""

    def make_room(self, rank: int, complete: int | None) -> None:
        """Close all memory of a rank but that of the step ``complete``."""

    def hold(self, rank: int, step: int, file: MemoryFile) -> None:
        """Keep a rank's memory of a step."""

    def give_up(self, rank: int, step: int) -> None:
        """Close a rank's memory of a step."""

    def find(self, rank: int, step: int) -> MemoryFile | None:
        """Return where a rank's snapshot lies; None: not here."""

    def describe(self, rank: int, step: int) -> tuple[str, int]:
        """Return the name of a snapshot's memory, and its bytes."""

    def chunks(self, rank: int, step: int, nbytes: int) -> Iterator[bytes]:
        """Yield a snapshot's bytes in order."""


@dataclass(frozen=True)
class KnownKeeper:
    """Name and Ray namespace of a node's keeper. number: of those that the node has had before it."""

    node: str
    number: int
    namespace: str

    @property
    def name(self) -> str:
        """Its own: an actor that is being killed may hold its name for a while."""
        return f"snapshots-{self.node}-{self.number}"

    def later(self) -> Iterator[KnownKeeper]:
        """Yield what those that take its place may be, the first first."""
        for number in range(self.number + 1, self.number + 1 + _MOST_LATER):
            yield replace(self, number=number)


class RayKeeper:
    """A ``SnapshotKeeper`` as a Ray actor. One that died, or once did not answer, is not asked again.

    known: by which others that take its place are found; None: none is looked for.
    """

    def __init__(self, handle: ActorHandle, known: KnownKeeper | None = None) -> None:
        self._handle, self._known = handle, known
        self._problem: str | None = None

    def is_free(self, rank: int) -> bool:
        """See ``Keeper``."""
        return bool(self._ask("is_free", rank))

    def make_room(self, rank: int, complete: int | None) -> None:
        """See ``Keeper``."""
        self._ask("make_room", rank, complete)

    def hold(self, rank: int, step: int, file: MemoryFile) -> None:
        """See ``Keeper``."""
        self._ask("hold", rank, step, file)

    def give_up(self, rank: int, step: int) -> None:
        """See ``Keeper``."""
        self._ask("give_up", rank, step)

    def find(self, rank: int, step: int) -> MemoryFile | None:
        """See ``Keeper``."""
        found: MemoryFile | None = self._ask("find", rank, step)
        return found

    def describe(self, rank: int, step: int) -> tuple[str, int]:
        """See ``Keeper``."""
        name, nbytes = self._ask("describe", rank, step)
        return name, nbytes

    def chunks(self, rank: int, step: int, nbytes: int) -> Iterator[bytes]:
        """See ``Keeper``; some chunks are under way at a time."""
        calls: deque[ray.ObjectRef[bytes]] = deque()
        for offset in range(0, nbytes, _CHUNK_NBYTES):
            calls.append(self._call("read", rank, step, offset, min(_CHUNK_NBYTES, nbytes - offset)))
            if len(calls) == _CHUNKS_AHEAD:
                yield self._answer(calls.popleft())
        while calls:
            yield self._answer(calls.popleft())

    def _ask(self, method: str, *arguments: Any) -> Any:
        return self._answer(self._call(method, *arguments))

    def _call(self, method: str, *arguments: Any) -> ray.ObjectRef[Any]:
        if self._problem is not None:
            self._look_for_another(self._problem)
        call: ray.ObjectRef[Any] = getattr(self._handle, method).remote(*arguments)
        return call

    def _answer(self, call: ray.ObjectRef[T]) -> T:
        try:
            return ray.get(call, timeout=ANSWER_S)
        except ray.exceptions.GetTimeoutError as error:
            self._problem = f"the node's keeper of snapshots did not answer within {ANSWER_S:g} s"
            raise SnapshotLostError(self._problem) from error
        except ray.exceptions.RayTaskError as error:
            raise SnapshotLostError(str(error.cause)) from error
        except ray.exceptions.RayError as error:
            self._problem = "the node's keeper of snapshots died"
            raise SnapshotLostError(self._problem) from error

    def _look_for_another(self, problem: str) -> None:
        for later in () if self._known is None else self._known.later():
            try:
                self._handle = ray.get_actor(later.name, later.namespace)
            except (ray.exceptions.RayError, ValueError):
                continue  # there is none yet, or it was lost too
            self._known, self._problem = later, None
            return
        raise SnapshotLostError(problem)
