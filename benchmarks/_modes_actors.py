"""The run's own actors, which also count the bytes that pass through their pools."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowtrain.actors.backbone import BackboneRank
from flowtrain.actors.encoder import Encoder
from flowtrain.actors.feeder import Feeder
from flowtrain.mempool.page_table import Mapping
from flowtrain.mempool.pool import Pool
from flowtrain.mempool.transports.base import Transport
from flowtrain.mempool.transports.point_to_point import PointToPointTransport

COUNTERS_ENV = "FLOWTRAIN_BENCHMARK_COUNTERS"


class _Counter:
    """Bytes copied by this process, in a file that the benchmark reads while the process lives."""

    def __init__(self, directory: Path) -> None:
        self._value = np.memmap(directory / f"{os.getpid()}.count", np.int64, "w+", shape=(1,))
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._value[0] += nbytes


def copied_nbytes(directory: Path) -> int:
    """The sum over all processes that counted into a directory."""
    return sum(int(np.fromfile(path, np.int64, 1)[0]) for path in directory.glob("*.count"))


def count_copies(directory: Path) -> None:
    """Count, from now on, the bytes that this process copies into and out of its pool.

    A put or a write in place counts once, a read into memory once, and twice across a socket (into it and out of it).
    Views copy nothing.
    """
    counter = _Counter(directory)

    def counted(method: Callable[..., Any], nbytes_of: Callable[..., int]) -> Callable[..., Any]:
        def call(self: object, *args: Any, **kwargs: Any) -> Any:
            result = method(self, *args, **kwargs)
            counter.add(nbytes_of(*args, **kwargs))
            return result

        return call

    def of_reserved(nbytes: int, hold: object = None) -> int:
        return nbytes

    def of_scattered(sources: Sequence[Mapping], destinations: object) -> int:
        return sum(source.nbytes for source in sources)

    # ``put`` reserves too, and every other way to read ends in ``scatter``.
    Pool.reserve = counted(Pool.reserve, of_reserved)  # type: ignore[method-assign]
    Transport.scatter = counted(Transport.scatter, of_scattered)  # type: ignore[method-assign]
    across = counted(PointToPointTransport.scatter, lambda *args: 2 * of_scattered(*args))
    PointToPointTransport.scatter = across  # type: ignore[method-assign]


class _Counting:
    """Counts from the actor's start."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        count_copies(Path(os.environ[COUNTERS_ENV]))


class CountingEncoder(_Counting, Encoder):
    """See ``_Counting``."""


class CountingFeeder(_Counting, Feeder):
    """See ``_Counting``."""


class CountingBackboneRank(_Counting, BackboneRank):
    """See ``_Counting``."""
