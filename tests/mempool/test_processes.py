"""The pool between real OS processes: zero-copy reads, a killed owner, nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import uuid
from multiprocessing.connection import Connection

import numpy as np
import pytest

from flowtrain.errors import AddressError, OwnerLostError
from flowtrain.mempool.gva import AddressSpace
from flowtrain.mempool.pool import Pool
from flowtrain.types.memory import Extent, SegmentExport
from tests.mempool.conftest import traces

pytestmark = pytest.mark.processes

SPACE = AddressSpace(num_processes=64, segment_nbytes=1 << 26)
CONTEXT = multiprocessing.get_context("spawn")


def open_pool(run_id: str, index: int, nbytes: int, exports: list[SegmentExport]) -> Pool:
    return Pool(index, "node", run_id, SPACE, nbytes, 256, "knob", lambda: exports, processes_per_node=64)


def payload(seed: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def write(run_id: str, connection: Connection) -> None:
    """The owner: puts two parts, exports, then waits to be killed (or told to end)."""
    pool = open_pool(run_id, 3, 4 << 20, [])
    connection.send((pool.export(), [pool.put(payload(seed, 1 << 20)) for seed in range(2)]))
    connection.recv()
    pool.close()


def read(run_id: str, connection: Connection) -> None:
    """A peer: reads what it is told to, and goes on reading what it has mapped when the owner is dead."""
    export, parts = connection.recv()
    pool = open_pool(run_id, 4, 0, [export])
    views = pool.get_batch(parts)
    connection.send(all((view == payload(seed, len(view))).all() for seed, view in enumerate(views)))
    connection.send([view.flags.owndata for view in views])
    connection.recv()  # the owner is dead now
    fresh = pool.get_batch(parts)
    connection.send(all((view == payload(seed, len(view))).all() for seed, view in enumerate([*views, *fresh][:2])))
    connection.send(all((fresh[i] == views[i]).all() for i in range(2)))
    pool.close()


def wait_until_clean(run_id: str) -> list[str]:
    deadline = time.monotonic() + 20
    while (found := traces(run_id)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def test_a_killed_owner_is_still_read_by_who_mapped_it_and_lost_to_others() -> None:
    run_id = uuid.uuid4().hex[:12]
    to_writer, writer_end = CONTEXT.Pipe()
    to_reader, reader_end = CONTEXT.Pipe()
    writer = CONTEXT.Process(target=write, args=(run_id, writer_end))
    reader = CONTEXT.Process(target=read, args=(run_id, reader_end))
    try:
        writer.start()
        reader.start()
        export, parts = to_writer.recv()
        assert traces(run_id), "the owner's memory is visible while it lives"
        to_reader.send((export, parts))
        assert to_reader.recv() is True
        assert to_reader.recv() == [False, False], "reads are views, not copies"

        os.kill(writer.pid or 0, signal.SIGKILL)
        writer.join(20)
        to_reader.send("dead")
        assert to_reader.recv() is True and to_reader.recv() is True
        newcomer = open_pool(run_id, 5, 0, [export])
        with pytest.raises(OwnerLostError, match="segment of process 3 .* is gone"):
            newcomer.get(parts[0])
        newcomer.close()
        reader.join(20)
        assert reader.exitcode == 0
    finally:
        for process in (writer, reader):
            if process.is_alive():
                process.kill()
            process.join(20)
    assert wait_until_clean(run_id) == []


def write_as(run_id: str, index: int, seed: int, connection: Connection) -> None:
    """An owner under an index that it is given."""
    pool = open_pool(run_id, index, 4 << 20, [])
    connection.send((pool.export(), pool.put(payload(seed, 1 << 20))))
    connection.recv()


def test_what_a_restarted_process_has_is_never_read_under_old_addresses() -> None:
    run_id = uuid.uuid4().hex[:12]
    published: list[SegmentExport] = []
    reader = Pool(4, "node", run_id, SPACE, 0, 256, "knob", lambda: published, processes_per_node=64)
    processes = []

    def start(index: int, seed: int) -> tuple[SegmentExport, tuple[Extent, ...]]:
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=write_as, args=(run_id, index, seed, theirs))
        process.start()
        processes.append((process, ours))
        export, extents = ours.recv()
        assert isinstance(export, SegmentExport)
        return export, extents

    try:
        first, old = start(3, 0)
        published[:] = [first]
        kept = reader.get(old)
        processes[0][0].kill()
        processes[0][0].join(20)
        second, new = start(7, 1)
        published[:] = [second]
        assert (reader.get(new) == payload(1, 1 << 20)).all(), "a miss, which also tells that the first is gone"
        with pytest.raises(OwnerLostError, match="ask the coordinator again by position"):
            reader.get(old)
        assert (kept == payload(0, 1 << 20)).all(), "a view outlives its owner"
        wrong, _ = start(3, 2)
        published[:] = [second, wrong]
        with pytest.raises(AddressError, match="a restarted process must take a new index"):
            reader.get(old)
    finally:
        for process, _ in processes:
            process.kill()
            process.join(20)
    reader.close()
    del kept
    assert wait_until_clean(run_id) == []


def test_an_owner_that_ends_by_itself_leaves_nothing() -> None:
    run_id = uuid.uuid4().hex[:12]
    connection, other_end = CONTEXT.Pipe()
    writer = CONTEXT.Process(target=write, args=(run_id, other_end))
    writer.start()
    export, parts = connection.recv()
    reader = open_pool(run_id, 4, 0, [export])
    view = reader.get(parts[1])
    connection.send("end")
    writer.join(20)
    assert writer.exitcode == 0
    assert (view == payload(1, 1 << 20)).all()
    reader.close()
    del view
    assert wait_until_clean(run_id) == []
