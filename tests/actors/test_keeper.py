"""Keepers of snapshots: memory outlives its process, and only the last complete snapshot and the next one take room."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from flowtrain.actors import keeper as keeper_module
from flowtrain.actors.keeper import KnownKeeper, RayKeeper, SnapshotKeeper
from flowtrain.errors import SnapshotLostError
from flowtrain.types.memory import HostMemory, MemoryFile


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


def test_a_rank_is_free_once_its_last_snapshot_is_complete() -> None:
    source, keeper = SnapshotKeeper(), SnapshotKeeper()
    assert keeper.is_free(0)
    give(keeper, 0, 4, None)
    keeper.completed(2)
    assert not keeper.is_free(0) and keeper.is_free(1)
    keeper.completed(4)
    assert keeper.is_free(0)
    for end in (lambda: keeper.give_up(0, 6), lambda: keeper.keep_only(4)):
        give(keeper, 0, 6, 4)
        assert not keeper.is_free(0)
        end()
        assert keeper.is_free(0) and keeper.steps() == {0: (4,)}
    give(source, 1, 4, None)
    keeper.copy(Elsewhere(source), [1], 4)
    assert keeper.is_free(1), "a copy is nobody's last snapshot"
    keeper.keep_only(None)
    source.keep_only(None)


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


# --- copies of another node's snapshots ------------------------------------------------------------------------------


class Elsewhere:
    """A keeper on another node, read in chunks of three bytes. before: called before each one."""

    def __init__(self, keeper: SnapshotKeeper, before: Callable[[int], None] = lambda offset: None) -> None:
        self._keeper, self._before = keeper, before

    def describe(self, rank: int, step: int) -> tuple[str, int]:
        return self._keeper.describe(rank, step)

    def chunks(self, rank: int, step: int, nbytes: int) -> Iterator[bytes]:
        for offset in range(0, nbytes, 3):
            self._before(offset)
            yield self._keeper.read(rank, step, offset, min(3, nbytes - offset))


def test_a_copy_outlives_the_node_that_it_is_of() -> None:
    before, source, keeper = open_files(), SnapshotKeeper(), SnapshotKeeper()
    for rank in (0, 1, 2):
        give(source, rank, 10, None)
    give(keeper, 5, 10, None)
    keeper.copy(Elsewhere(source), [0, 2], 10)
    source.keep_only(None)
    assert keeper.steps() == {5: (10,), 0: (10,), 2: (10,)}
    assert [content_of(keeper.find(rank, 10)) for rank in (0, 2, 5)] == [b"0 10", b"2 10", b"5 10"]
    assert open_files() == before + 3
    keeper.completed(11)
    assert open_files() == before


def test_what_is_here_is_not_copied_again() -> None:
    keeper = SnapshotKeeper()
    give(keeper, 0, 10, None)
    keeper.copy(Elsewhere(SnapshotKeeper()), [0], 10)
    assert content_of(keeper.find(0, 10)) == b"0 10"


def test_a_copy_of_what_is_given_up_meanwhile_is_none() -> None:
    before, source, keeper = open_files(), SnapshotKeeper(), SnapshotKeeper()
    give(source, 0, 10, None)
    with pytest.raises(SnapshotLostError, match="the snapshot of rank 0 after step 10 is not there any more"):
        keeper.copy(Elsewhere(source, lambda offset: source.keep_only(None)), [0], 10)
    with pytest.raises(SnapshotLostError, match="rank 0 after step 12 is not there"):
        keeper.copy(Elsewhere(source), [0], 12)
    assert keeper.steps() == {} and open_files() == before


def test_a_copy_is_not_kept_if_the_run_went_back_meanwhile() -> None:
    before, source, keeper = open_files(), SnapshotKeeper(), SnapshotKeeper()
    give(source, 0, 10, None)
    with pytest.raises(SnapshotLostError, match="the run went back while the snapshot of step 10 was copied"):
        keeper.copy(Elsewhere(source, lambda offset: keeper.keep_only(8)), [0], 10)
    assert keeper.steps() == {} and open_files() == before + 1


def test_a_copy_needs_room(monkeypatch: pytest.MonkeyPatch) -> None:
    source, keeper = SnapshotKeeper(), SnapshotKeeper()
    give(source, 0, 10, None)
    monkeypatch.setattr(keeper_module, "host_memory", lambda: HostMemory(100, 7, None, None))
    with pytest.raises(SnapshotLostError, match=r"needs 4 bytes, more than half of the 7 bytes of memory"):
        keeper.copy(Elsewhere(source), [0], 10)


def test_chunks_come_in_order_with_some_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    source, under_way, most = SnapshotKeeper(), 0, 0
    give(source, 0, 10, None)

    def read(*where: int) -> bytes:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        return source.read(*where)

    def get(answer: Any, timeout: float) -> Any:
        nonlocal under_way
        under_way -= isinstance(answer, bytes)
        return answer

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(keeper_module, "_CHUNK_NBYTES", 1)
    monkeypatch.setattr(keeper_module, "_CHUNKS_AHEAD", 2)
    handle = SimpleNamespace(read=SimpleNamespace(remote=read), describe=SimpleNamespace(remote=source.describe))
    keeper = SnapshotKeeper()
    keeper.copy(RayKeeper(handle), [0], 10)
    assert content_of(keeper.find(0, 10)) == b"0 10" and most == 2 and under_way == 0


def test_a_keeper_that_hangs_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    def get(answer: Any, timeout: float) -> Any:
        waited.append(timeout)
        raise ray.exceptions.GetTimeoutError

    monkeypatch.setattr(ray, "get", get)
    call = SimpleNamespace(remote=lambda *_: None)
    keeper = RayKeeper(SimpleNamespace(is_free=call, make_room=call, give_up=call, read=call))
    for ask in (lambda: keeper.is_free(0), lambda: keeper.make_room(0, 2), lambda: keeper.give_up(0, 2)):
        with pytest.raises(SnapshotLostError, match=r"keeper of snapshots did not answer within 60 s"):
            ask()
    with pytest.raises(SnapshotLostError):
        next(keeper.chunks(0, 2, 10))
    assert waited == [60.0], "each of the steps after it would wait again"


def test_ranks_find_the_keeper_that_took_a_lost_ones_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where several were lost in between; until there is one the loss stays."""
    actors: dict[str, Any] = {}

    def get(answer: Any, timeout: float) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    def get_actor(name: str, namespace: str) -> Any:
        assert namespace == "run"
        if name not in actors:
            raise ValueError(name)
        return actors[name]

    def handle(answer: Any) -> Any:
        return SimpleNamespace(is_free=SimpleNamespace(remote=lambda rank: answer))

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "get_actor", get_actor)
    known = KnownKeeper("node", 0, "run")
    keeper = RayKeeper(handle(ray.exceptions.RayActorError()), known)
    for _ in range(2):
        with pytest.raises(SnapshotLostError, match="keeper of snapshots died"):
            keeper.is_free(0)
    actors["snapshots-node-2"] = handle(True)
    assert keeper.is_free(0) and keeper.is_free(0)
    assert known.name == "snapshots-node-0"
