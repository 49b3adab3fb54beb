"""Segments that peers cannot map: bytes come over a socket, from a process that may die, to readers that it knows."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import socket
import threading
import uuid
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowtrain.errors import OwnerLostError, PoolError
from flowtrain.mempool.gva import AddressSpace
from flowtrain.mempool.pool import Pool
from flowtrain.mempool.transports import socket_server
from flowtrain.mempool.transports.socket_server import ACCEPTED, COUNT, TOKEN_NBYTES, receive
from flowtrain.types.memory import Extent, SegmentExport, SocketOffer
from tests.mempool.conftest import mappings

SPACE = AddressSpace(num_processes=16, segment_nbytes=1 << 24)
CONTEXT = multiprocessing.get_context("spawn")
LIMIT_S = 20.0


def open_pool(run_id: str, index: int, nbytes: int, exports: list[SegmentExport], timeout_s: float = LIMIT_S) -> Pool:
    return Pool(
        index, "node", run_id, SPACE, nbytes, 64, "knob", lambda: exports, transfer_timeout_s=timeout_s, is_private=True
    )


class World:
    """Two private owners and a reader in one process."""

    def __init__(self) -> None:
        self.run_id = uuid.uuid4().hex[:12]
        self.exports: list[SegmentExport] = []
        self.owners = [open_pool(self.run_id, index, 1 << 20, []) for index in range(2)]
        self.publish()
        self.reader = open_pool(self.run_id, 2, 0, self.exports)

    def publish(self) -> None:
        self.exports[:] = [export for owner in self.owners for export in owner.exports()]

    def close(self) -> None:
        for pool in (self.reader, *self.owners):
            pool.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()
    for each in exchange_threads():  # so that the next test counts its own
        each.join(LIMIT_S)


def exchange_threads() -> list[threading.Thread]:
    """Threads of this process that wait for readers or serve one."""
    return [each for each in threading.enumerate() if each.name == "exchange"]


def payload(seed: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def test_what_is_read_is_a_copy_and_no_segment_is_mapped(world: World) -> None:
    data = payload(0, 5000)
    extents = world.owners[0].put(data)
    before = len(mappings(world.run_id))
    read = world.reader.get(extents)
    assert (read == data).all() and not np.shares_memory(read, world.owners[0].get(extents))
    (batched,) = world.reader.get_batch([extents])
    assert (batched == data).all() and not batched.flags.writeable
    assert len(mappings(world.run_id)) == before, "the owners, in this process, map their own"
    assert all(export.fd == -1 for export in world.exports)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 3000)), min_size=1, max_size=40))
def test_a_batch_of_several_owners_comes_in_its_order(world: World, parts: list[tuple[int, int]]) -> None:
    put = [(owner, world.owners[owner].put(payload(seed, nbytes))) for seed, (owner, nbytes) in enumerate(parts)]
    destination = np.zeros(sum(nbytes for _, nbytes in parts), np.uint8)
    world.reader.read_batch_into([extents for _, extents in put], destination)
    assert (destination == np.concatenate([payload(seed, n) for seed, (_, n) in enumerate(parts)])).all()
    for owner, extents in put:
        world.owners[owner].release(extents)


def test_a_part_larger_than_a_sockets_buffer_is_read_whole(world: World) -> None:
    data = payload(1, 1 << 20)
    read = world.reader.get(world.owners[1].put(data))
    assert (read == data).all()


def test_more_runs_than_one_call_takes_are_read(world: World) -> None:
    parts = [world.owners[0].put(bytes([number % 256]) * 10) for number in range(1000)]
    destination = np.zeros(10_000, np.uint8)
    world.reader.read_batch_into(parts, destination)
    assert (destination.reshape(1000, 10) == (np.arange(1000) % 256)[:, None]).all()


def test_a_segment_that_grew_is_read_to_its_end(world: World) -> None:
    world.owners[0].grow(1 << 21)
    world.publish()
    part = world.owners[0].put(payload(3, (1 << 20) + 4096))
    assert (world.reader.get(part) == payload(3, (1 << 20) + 4096)).all()


def test_a_closed_owner_is_lost(world: World) -> None:
    extents = world.owners[0].put(b"a" * 100)
    world.reader.get(extents)
    world.owners[0].close()
    for _ in range(2):
        with pytest.raises(OwnerLostError, match=r"process 0 \(pid .* ask the coordinator again by position"):
            world.reader.get(extents)
    other = world.owners[1].put(b"b" * 100)
    assert world.reader.get(other).tobytes() == b"b" * 100


def test_after_a_loss_the_other_owners_answer_is_not_taken_for_the_next_one(world: World) -> None:
    lost, first, second = (
        world.owners[0].put(b"a" * 100),
        world.owners[1].put(b"b" * 100),
        world.owners[1].put(b"c" * 100),
    )
    world.reader.get_batch([lost, first])
    world.owners[0].close()
    with pytest.raises(OwnerLostError):
        world.reader.get_batch([first, lost])
    assert world.reader.get(second).tobytes() == b"c" * 100


def test_a_process_that_took_over_the_name_is_not_read(world: World) -> None:
    extents = world.owners[0].put(b"a" * 100)
    world.exports[0] = replace(world.exports[0], pid=1)
    with pytest.raises(OwnerLostError, match=f"process 1 of user .* process {os.getpid()} of user"):
        world.reader.get(extents)


def test_a_process_of_another_user_gets_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    extents = world.owners[0].put(b"a" * 100)
    monkeypatch.setattr(socket_server, "peer_of", lambda connection: (os.getpid(), os.getuid() + 1))
    with pytest.raises(OwnerLostError):
        world.reader.get(extents)


def connected(offer: SocketOffer) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(LIMIT_S)
    connection.connect(f"\0{offer.name}")
    return connection


def offer_of(world: World) -> SocketOffer:
    offer = world.exports[0].socket
    assert offer is not None
    return offer


def request(*runs: tuple[int, int]) -> bytes:
    return COUNT.pack(len(runs)) + np.array(runs, "<i8").tobytes()


def ends(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_without_the_token_the_owner_hangs_up(world: World) -> None:
    with connected(offer_of(world)) as connection:
        connection.sendall(b"x" * TOKEN_NBYTES + request((0, 10)))
        assert ends(connection)
    assert repr(offer_of(world).token) not in repr(world.exports[0])


@pytest.mark.parametrize("run", [(0, (1 << 20) + 1), (-1, 10), (10, -1), (1 << 62, 1 << 62)])
def test_bytes_outside_the_segment_are_refused(world: World, run: tuple[int, int]) -> None:
    with connected(offer_of(world)) as connection:
        connection.sendall(offer_of(world).token + request((0, 10)))
        assert receive(connection, 11)[:1] == ACCEPTED
        connection.sendall(request(run))
        assert connection.recv(1) == socket_server.REFUSED
        assert ends(connection)


def test_a_refusal_is_an_error_of_the_program(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    extents = world.owners[0].put(b"a" * 100)
    monkeypatch.setattr(world.owners[0]._server, "_memory", lambda: np.empty(0, np.uint8))
    with pytest.raises(PoolError, match="process 0 refused a request for 100 bytes"):
        world.reader.get(extents)


def test_a_request_of_too_many_runs_ends_the_connection(world: World) -> None:
    with connected(offer_of(world)) as connection:
        connection.sendall(offer_of(world).token + COUNT.pack(1 << 40))
        assert ends(connection)


def test_an_owner_that_sends_nothing_is_lost_after_the_limit() -> None:
    run_id = uuid.uuid4().hex[:12]
    silent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    silent.bind(f"\0flowtrain-test-{run_id}")
    silent.listen()
    owner = open_pool(run_id, 0, 1 << 16, [])
    extents = owner.put(b"a" * 100)
    (export,) = owner.exports()
    offer = SocketOffer(f"flowtrain-test-{run_id}", b"t" * TOKEN_NBYTES)
    reader = open_pool(run_id, 1, 0, [replace(export, socket=offer)], timeout_s=0.05)
    with silent, pytest.raises(OwnerLostError, match=r"pool\.transfer_timeout_s: 100 bytes was not transferred"):
        reader.get(extents)
    reader.close()
    owner.close()


def test_an_owner_that_could_not_take_a_connection_takes_later_ones(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept = socket.socket.accept
    failures = iter([OSError(errno.EMFILE, "Too many open files")])

    def fail_once(listener: socket.socket) -> tuple[socket.socket, Any]:
        failure = next(failures, None)
        if failure is not None:
            raise failure
        return accept(listener)

    monkeypatch.setattr(socket_server, "_RETRY_S", 0.01)
    monkeypatch.setattr(socket.socket, "accept", fail_once)
    extents = world.owners[0].put(b"a" * 100)
    world.reader.get(extents)  # after it the owner waits for the next reader
    other = open_pool(world.run_id, 3, 0, world.exports)
    assert other.get(extents).tobytes() == b"a" * 100
    other.close()


def test_close_ends_the_owners_threads(world: World) -> None:
    world.reader.get(world.owners[0].put(b"a" * 100))
    served = exchange_threads()
    assert len(served) == 3, "two owners wait for readers, one serves a reader"
    world.close()
    for each in served:
        each.join(LIMIT_S)
        assert not each.is_alive()


@pytest.mark.processes
def test_an_owner_that_is_killed_in_the_middle_is_lost() -> None:
    run_id = uuid.uuid4().hex[:12]
    ours, theirs = CONTEXT.Pipe()
    owner = CONTEXT.Process(target=own, args=(run_id, theirs))
    owner.start()
    try:
        export, extents = ours.recv()
        reader = open_pool(run_id, 4, 0, [export])
        assert (reader.get(extents) == payload(0, 1 << 20)).all()
        os.kill(owner.pid or 0, signal.SIGSTOP)  # it takes requests, and answers none
        killer = threading.Thread(target=owner.kill)
        killer.start()
        with pytest.raises(OwnerLostError, match=r"process 3 \(pid"):
            for _ in range(3):
                reader.get(extents)
        killer.join()
        reader.close()
    finally:
        owner.kill()
        owner.join(LIMIT_S)


def own(run_id: str, connection: Connection) -> None:
    pool = open_pool(run_id, 3, 4 << 20, [])
    extents: tuple[Extent, ...] = pool.put(payload(0, 1 << 20))
    connection.send((pool.export(), extents))
    connection.recv()
