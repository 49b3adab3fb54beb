"""Processes of one run that count as different nodes: an owner that does as it is told, over forced TCP."""

from __future__ import annotations

import multiprocessing
import os
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from shared.hosts import Host

from flowtrain.mempool.gva import AddressSpace
from flowtrain.mempool.pool import Pool
from flowtrain.types.memory import Extent, SegmentExport

SPACE = AddressSpace(num_processes=16, segment_nbytes=1 << 28)
PER_NODE = 4
ALIGNMENT = 256
ANSWER_LIMIT_S = 60.0
CONTEXT = multiprocessing.get_context("spawn")


def payload(seed: int, nbytes: int) -> np.ndarray:
    """Bytes that only this seed has."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def open_pool(
    run_id: str, index: int, nbytes: int, fetch: Callable[[], list[SegmentExport]], timeout_s: float = 20.0
) -> Pool:
    """The pool of a process; indices of one block of ``PER_NODE`` are one node."""
    return Pool(
        process_index=index,
        node_id=f"node-{index // PER_NODE}",
        run_id=run_id,
        address_space=SPACE,
        segment_nbytes=nbytes,
        alignment=ALIGNMENT,
        knob="encoders.vision.segment_nbytes",
        fetch_exports=fetch,
        processes_per_node=PER_NODE,
        network="nixl",
        transfer_timeout_s=timeout_s,
    )


def serve(connection: Connection, run_id: str, index: int, nbytes: int, host: Host | None) -> None:
    """A peer's process: answers (method, arguments) until it is told to end."""
    os.environ["UCX_TLS"] = "tcp"
    if host is not None:
        host.enter()
    pool = open_pool(run_id, index, nbytes, lambda: _published)
    connection.send(pool.export())
    while True:
        method, *args = connection.recv()
        if method == "leave":  # without closing anything
            return
        try:
            connection.send(_METHODS[method](pool, *args))
        except BaseException:
            connection.send(traceback.format_exc())
            raise
        if method == "close":
            return


_published: list[SegmentExport] = []


def _read(pool: Pool, exports: list[SegmentExport], parts: list[tuple[int, tuple[Extent, ...]]]) -> list[int]:
    """Read parts given as (seed, extents) in one batch; returns the seeds of those that differ."""
    _published[:] = exports
    found = pool.get_batch([extents for _, extents in parts])
    return [seed for (seed, _), data in zip(parts, found, strict=True) if (data != payload(seed, len(data))).any()]


_METHODS: dict[str, Callable[..., Any]] = {
    "put": lambda pool, seed, nbytes: pool.put(payload(seed, nbytes)),
    "put_many": lambda pool, sizes: [pool.put(payload(seed, nbytes)) for seed, nbytes in sizes],
    "release": lambda pool, extents: pool.release(extents),
    "grow": lambda pool, nbytes: pool.grow(nbytes),
    "read": _read,
    "close": lambda pool: pool.close(),
}


class Owner:
    """A peer as the test sees it. ``export`` is what it published last."""

    def __init__(self, run_id: str, index: int, nbytes: int, host: Host | None = None) -> None:
        self._connection, other_end = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=serve, args=(other_end, run_id, index, nbytes, host))
        self.process.start()
        other_end.close()
        self.export: SegmentExport = self._answer()

    def ask(self, method: str, *args: Any) -> Any:
        """Have it do something and return what came of it."""
        self.tell(method, *args)
        return self._answer()

    def tell(self, method: str, *args: Any) -> None:
        """Have it do something that gives no answer."""
        self._connection.send((method, *args))

    def put(self, seed: int, nbytes: int) -> tuple[Extent, ...]:
        """Have it put the payload of a seed."""
        extents: tuple[Extent, ...] = self.ask("put", seed, nbytes)
        return extents

    def grow(self, nbytes: int) -> None:
        """Have it bind more, and publish that."""
        self.export = self.ask("grow", nbytes)

    def end(self) -> None:
        """Make sure that it has ended."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join(ANSWER_LIMIT_S)

    def _answer(self) -> Any:
        assert self._connection.poll(ANSWER_LIMIT_S), f"no answer within {ANSWER_LIMIT_S:g} s"
        return self._connection.recv()


class Net:
    """Owners on other nodes and readers in this process."""

    def __init__(self) -> None:
        self.run_id = uuid.uuid4().hex[:12]
        self.owners: dict[int, Owner] = {}
        self.pools: list[Pool] = []
        self.num_fetches = 0

    def owner(self, index: int, nbytes: int = 4 << 20, host: Host | None = None) -> Owner:
        """Start an owner; host: where, if not here."""
        self.owners[index] = Owner(self.run_id, index, nbytes, host)
        return self.owners[index]

    def reader(self, index: int, timeout_s: float = 20.0) -> Pool:
        """Open a pool that only reads."""
        pool = open_pool(self.run_id, index, 0, self.exports, timeout_s)
        self.pools.append(pool)
        return pool

    def exports(self) -> list[SegmentExport]:
        """What the coordinator would list."""
        self.num_fetches += 1
        return [owner.export for owner in self.owners.values()]


@contextmanager
def net() -> Iterator[Net]:
    """A run whose processes do not outlive the block."""
    made = Net()
    try:
        yield made
    finally:
        for pool in made.pools:
            pool.close()
        for owner in made.owners.values():
            owner.end()
