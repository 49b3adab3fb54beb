"""Keepers of snapshots: memory outlives its process, and only the last complete snapshot and the next one take room."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from flowtrain.actors.keeper import SnapshotKeeper
from flowtrain.errors import SnapshotLostError
from flowtrain.types.memory import MemoryFile


def make(content: bytes) -> MemoryFile:
    fd = os.memfd_create("state", os.MFD_CLOEXEC)
    os.write(fd, content)
    return MemoryFile(os.getpid(), fd, "state")


def content_of(file: MemoryFile | None) -> bytes:
    assert file is not None
    return Path(f"/proc/{file.pid}/fd/{file.fd}").read_bytes()


def give(keeper: SnapshotKeeper, rank: int, step: int, complete: int | None) -> None:
    keeper.make_room(rank, complete)
    file = make(f"{rank} {step}".encode())
    keeper.hold(rank, step, file)
    os.close(file.fd)


def open_files() -> int:
    return sum("memfd:state" in os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())


def test_only_the_complete_snapshot_and_the_next_are_kept() -> None:
    before, keeper = open_files(), SnapshotKeeper()
    for rank in (0, 1):
        give(keeper, rank, 2, None)
    give(keeper, 0, 4, 2)  # the other rank never comes
    assert keeper.steps() == {0: (2, 4), 1: (2,)}
    give(keeper, 0, 6, 2)
    assert keeper.steps() == {0: (2, 6), 1: (2,)}
    give(keeper, 1, 6, 2)
    assert open_files() == before + 4
    keeper.completed(6)
    assert keeper.steps() == {0: (6,), 1: (6,)} and open_files() == before + 2
    assert content_of(keeper.find(1, 6)) == b"1 6"
    assert keeper.find(1, 2) is None and keeper.find(7, 6) is None
    give(keeper, 0, 8, 6)
    give(keeper, 0, 10, 8)  # before the driver knows that 8 is complete
    assert keeper.steps()[0] == (8, 10)
    keeper.keep_only(6)
    assert keeper.steps() == {0: (), 1: (6,)}
    keeper.keep_only(None)
    assert keeper.steps() == {0: (), 1: ()} and open_files() == before


def test_a_step_that_is_done_again_replaces_its_snapshot() -> None:
    before, keeper = open_files(), SnapshotKeeper()
    give(keeper, 0, 2, None)
    file = make(b"again")
    keeper.hold(0, 2, file)
    os.close(file.fd)
    assert content_of(keeper.find(0, 2)) == b"again" and open_files() == before + 1


def hold_and_end(queue: multiprocessing.Queue[MemoryFile], ended: multiprocessing.Event) -> None:  # type: ignore[valid-type]
    queue.put(make(b"of the dead"))
    ended.wait(60)  # type: ignore[attr-defined]


@pytest.mark.processes
def test_memory_outlives_its_process() -> None:
    context, keeper = multiprocessing.get_context("spawn"), SnapshotKeeper()
    queue, ended = context.Queue(), context.Event()
    process = context.Process(target=hold_and_end, args=(queue, ended))
    process.start()
    file = queue.get(timeout=60)
    keeper.hold(3, 8, file)
    ended.set()
    process.join(60)
    assert content_of(keeper.find(3, 8)) == b"of the dead"
    with pytest.raises(SnapshotLostError, match=r"cannot open the memory of rank 3: /proc/\d+/fd/\d+ is "):
        keeper.hold(3, 10, file)
    assert keeper.steps() == {3: (8,)}, "what is there stays"
