"""Handshakes of the pool between hosts: network namespaces joined by a switch, real pools, real NIXL over forced TCP.

Each host has a process that gives a segment, and one that holds several readers, each with a NIXL agent of its own as a
rank has. In turn, each reads one extent of every other host's segment, in one
batch as a rank's first microbatch; then all readers read once more at the same time, first from a second set of agents.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

from shared.hosts import Host, NoHosts, switched_hosts

from flowtrain.mempool.gva import AddressSpace
from flowtrain.mempool.pool import Pool
from flowtrain.types.memory import Extent, SegmentExport

NUM_HOSTS, NUM_READERS = 4, 8
SPACE = AddressSpace(num_processes=256, segment_nbytes=1 << 28)
PER_NODE = 32
SEGMENT_NBYTES = 16 << 20
PART_NBYTES = 256 << 10
LIMIT_S = 120.0
CONTEXT = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Handshakes:
    """Seconds: start of an agent that gives; of one that reads; first and next batch from all other hosts, alone.

    crowd_s: first batch of every reader, when all readers of all hosts start at once. export_nbytes: of an export.
    at_start, after_reads: open TCP connections between hosts, both ends counted: once all agents have started, and once
    all readers have read.
    """

    offer_s: list[float]
    agent_s: list[float]
    first_s: list[float]
    next_s: list[float]
    crowd_s: list[float]
    export_nbytes: int
    at_start: int
    after_reads: int


def measure(num_hosts: int = NUM_HOSTS, num_readers: int = NUM_READERS) -> Handshakes | None:
    """Measure; prints the reason and returns None if the machine forbids namespaces."""
    try:
        with switched_hosts(num_hosts) as hosts:
            return _measure(hosts, num_readers)
    except NoHosts as reason:
        print(f"the handshakes between hosts are left out: {reason}", file=sys.stderr)
        return None


def _measure(hosts: tuple[Host, ...], num_readers: int) -> Handshakes:
    run_id = uuid.uuid4().hex[:8]
    peers = [_Peer(_give, host, run_id, number * PER_NODE) for number, host in enumerate(hosts)]
    readers = [_Peer(_read, host, run_id, number * PER_NODE + 1, num_readers) for number, host in enumerate(hosts)]
    try:
        given = [peer.answer() for peer in peers]
        exports = [export for export, _, _ in given]
        found: dict[str, list[float]] = {}
        for number, reader in enumerate(readers):
            wanted = [extents for other, (_, extents, _) in enumerate(given) if other != number]
            reader.connection.send((exports, wanted))
        for reader in readers:
            found.setdefault("agent_s", []).extend(reader.answer())
        at_start = sum(host.num_connections() for host in hosts)
        for reader in readers:  # one host after another
            reader.connection.send("alone")
            first, following = reader.answer()
            found.setdefault("first_s", []).extend(first)
            found.setdefault("next_s", []).extend(following)
        after_reads = sum(host.num_connections() for host in hosts)
        start_s = time.time() + 1.0
        for reader in readers:
            reader.connection.send(start_s)
        for reader in readers:
            found.setdefault("crowd_s", []).extend(reader.answer())
        network = exports[0].network
        assert network is not None
        return Handshakes(
            offer_s=[took_s for _, _, took_s in given],
            export_nbytes=len(network),
            at_start=at_start,
            after_reads=after_reads,
            **found,
        )
    finally:
        for peer in (*readers, *peers):
            peer.end()


class _Peer:
    """A process on a host."""

    def __init__(self, body: Any, host: Host, *arguments: Any) -> None:
        self.connection, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=body, args=(theirs, host, *arguments))
        self._process.start()
        theirs.close()

    def answer(self) -> Any:
        if not self.connection.poll(LIMIT_S):
            raise TimeoutError(f"no answer within {LIMIT_S:g} s")
        return self.connection.recv()

    def end(self) -> None:
        self.connection.close()
        self._process.join(LIMIT_S)
        if self._process.is_alive():
            self._process.kill()


def _enter(host: Host) -> None:
    os.environ["UCX_TLS"] = "tcp"
    host.enter()


def _open_pool(run_id: str, index: int, nbytes: int, exports: list[SegmentExport]) -> Pool:
    return Pool(
        process_index=index,
        node_id=f"host-{index // PER_NODE}",
        run_id=run_id,
        address_space=SPACE,
        segment_nbytes=nbytes,
        alignment=256,
        knob="SEGMENT_NBYTES",
        fetch_exports=lambda: exports,
        processes_per_node=PER_NODE,
        network="nixl",
    )


def _give(connection: Connection, host: Host, run_id: str, index: int) -> None:
    _enter(host)
    started = time.perf_counter()
    pool = _open_pool(run_id, index, SEGMENT_NBYTES, [])
    export = pool.export()
    took_s = time.perf_counter() - started
    connection.send((export, pool.put(bytes(PART_NBYTES)), took_s))
    _wait_for_end(connection)
    pool.close()


def _read(connection: Connection, host: Host, run_id: str, index: int, count: int) -> None:
    _enter(host)
    exports, wanted = connection.recv()
    opened_s = []

    def open_readers() -> list[Pool]:
        pools = []
        for number in range(count):
            started = time.perf_counter()
            pools.append(_open_pool(run_id, index + number, 0, exports))
            opened_s.append(time.perf_counter() - started)
        return pools

    pools = open_readers()
    connection.send(opened_s)
    connection.recv()
    first = [_seconds(pool, wanted) for pool in pools]
    connection.send((first, [_seconds(pool, wanted) for pool in pools]))
    others = open_readers()
    start_s = connection.recv()
    crowd: list[float] = []

    def read(pool: Pool) -> None:
        time.sleep(max(0.0, start_s - time.time()))
        crowd.append(_seconds(pool, wanted))

    threads = [threading.Thread(target=read, args=(pool,)) for pool in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    connection.send(crowd)
    _wait_for_end(connection)
    for pool in (*pools, *others):
        pool.close()


def _seconds(pool: Pool, wanted: list[tuple[Extent, ...]]) -> float:
    started = time.perf_counter()
    for data in pool.get_batch(wanted):
        if data.any() or len(data) != PART_NBYTES:
            raise SystemExit("bytes from another host differ")
    return time.perf_counter() - started


def _wait_for_end(connection: Connection) -> None:
    try:
        connection.recv()
    except EOFError:
        return


if __name__ == "__main__":
    measured = measure()
    if measured is not None:
        for name in ("offer_s", "agent_s", "first_s", "next_s", "crowd_s"):
            seconds = getattr(measured, name)
            print(f"{name}: {1e3 * median(seconds):.1f} ms, up to {1e3 * max(seconds):.1f}; {len(seconds)} times")
        print(measured.export_nbytes, measured.at_start, measured.after_reads)
