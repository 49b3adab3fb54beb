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

from flowtrain.errors import OwnerLostError
from flowtrain.mempool.gva import AddressSpace
from flowtrain.mempool.pool import Pool
from flowtrain.types import SegmentExport
from tests.mempool.conftest import traces

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
