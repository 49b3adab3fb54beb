"""A writer and a reader process, and three ways to hand bytes over: FlowTrain's pool, Ray's store, a plain copy.

Each payload has other first bytes. The reader checks the sum over all bytes; with that it also touches every byte.
"""

from __future__ import annotations

import time
import uuid
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch

from flowtrain.mempool.gva import AddressSpace
from flowtrain.mempool.pool import Pool
from flowtrain.types.memory import Extent, SegmentExport

ROTATED_NBYTES = 256 << 20
"""Payloads kept alive on each side before the oldest is freed, so that no copy goes where the last one went."""
MAX_ROTATED = 1024
SEGMENT_NBYTES = 2 * ROTATED_NBYTES
SPACE = AddressSpace(num_processes=16, segment_nbytes=SEGMENT_NBYTES)
RUN_ID = uuid.uuid4().hex[:12]
NODE = "node"

Address = tuple[Extent, ...]


@dataclass(frozen=True)
class Written:
    """Payloads of a writer: seconds of each call, its address for the reader, and the sum that the reader must see."""

    seconds: list[float]
    places: list[Any]
    sums: list[int]


@dataclass(frozen=True)
class Seen:
    """Calls of a reader: seconds until it had the bytes, until they were a tensor, and until all were touched.

    sums: the sums of the bytes that it saw.
    """

    get_seconds: list[float]
    tensor_seconds: list[float]
    touch_seconds: list[float]
    sums: list[int]


def rotation(nbytes: int) -> int:
    """Number of payloads alive at a time."""
    return max(2, min(MAX_ROTATED, ROTATED_NBYTES // nbytes))


class Writer:
    """Puts payloads into its segment of the pool, into Ray's object store, and into plain buffers."""

    def __init__(self, run_id: str) -> None:
        torch.set_num_threads(1)
        self._pool = Pool(0, NODE, run_id, SPACE, SEGMENT_NBYTES, 256, "segment_nbytes", lambda: [])
        self._counter = 0

    def export(self) -> SegmentExport | None:
        return self._pool.export()

    def start(self, nbytes: int) -> None:
        """Begin with payloads of another size; free the others."""
        self._release(0)
        self._source = np.random.default_rng(nbytes).integers(0, 1 << 20, nbytes // 8, np.int64)
        self._rest = int(self._source[1:].sum())
        self._live: deque[Address] = deque()
        self._refs: deque[ray.ObjectRef] = deque()
        self._buffers = deque(np.full(nbytes // 8, 1) for _ in range(rotation(nbytes)))

    def put(self, count: int) -> Written:
        """By ``Pool.put``."""
        self._release(rotation(self._source.nbytes) - count)
        written = self._timed(count, lambda source: self._pool.put(source))
        self._live.extend(written.places)
        return written

    def write_in_place(self, count: int) -> Written:
        """By ``reserve`` and ``commit``; the writing between them is not the pool's work and is not timed."""
        self._release(rotation(self._source.nbytes) - count)
        seconds, places, sums = [], [], []
        for _ in range(count):
            sums.append(self._next())
            started = time.perf_counter()
            room = self._pool.reserve(self._source.nbytes)
            reserved = time.perf_counter()
            (view,) = room.views
            view[:] = self._source.view(np.uint8)
            filled = time.perf_counter()
            places.append(room.commit())
            seconds.append(reserved - started + time.perf_counter() - filled)
        self._live.extend(places)
        return Written(seconds, places, sums)

    def put_in_ray(self, count: int) -> Written:
        """By ``ray.put``."""
        while len(self._refs) > rotation(self._source.nbytes) - count:
            self._refs.popleft()
        written = self._timed(count, ray.put)
        self._refs.extend(written.places)
        return written

    def copy(self, count: int) -> Written:
        """Copy into plain arrays whose pages are touched; no process reads them."""

        def into_next(source: np.ndarray) -> None:
            buffer = self._buffers[0]
            buffer[:] = source
            self._buffers.rotate(-1)

        return self._timed(count, into_next)

    def _timed(self, count: int, write: Callable[[np.ndarray], Any]) -> Written:
        seconds, places, sums = [], [], []
        for _ in range(count):
            sums.append(self._next())
            self._source.max()  # read once, so that every way finds the same share of it in the cache
            started = time.perf_counter()
            places.append(write(self._source))
            seconds.append(time.perf_counter() - started)
        return Written(seconds, places, sums)

    def _next(self) -> int:
        """Change the payload; returns its sum."""
        self._counter += 1
        self._source[0] = self._counter
        return self._rest + self._counter

    def _release(self, keep: int) -> None:
        while len(getattr(self, "_live", ())) > keep:
            self._pool.release(self._live.popleft())


class Reader:
    """Gets payloads as tensors and touches every byte."""

    def __init__(self, run_id: str, export: SegmentExport) -> None:
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        self._pool = Pool(1, NODE, run_id, SPACE, 0, 256, "segment_nbytes", lambda: [export])

    def get(self, places: list[Address]) -> Seen:
        """From the pool."""
        return self._timed(places, self._pool.get)

    def get_from_ray(self, refs: list[ray.ObjectRef]) -> Seen:
        """From Ray's object store."""
        return self._timed(refs, ray.get)

    def hear(self, place: Address) -> None:
        """Receive an address, and do nothing."""

    def _timed(self, places: list[Any], get: Callable[[Any], np.ndarray]) -> Seen:
        seen = Seen([], [], [], [])
        for place in places:
            started = time.perf_counter()
            data = get(place)
            got = time.perf_counter()
            tensor = torch.frombuffer(data, dtype=torch.int64)
            made = time.perf_counter()
            seen.sums.append(int(tensor.sum()))
            seen.touch_seconds.append(time.perf_counter() - made)
            seen.tensor_seconds.append(made - got)
            seen.get_seconds.append(got - started)
        return seen
