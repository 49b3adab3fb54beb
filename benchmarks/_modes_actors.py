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
from flowtrain.mempool.pool import Pool

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
    """Count, from now on, the bytes that pools of this process copy: puts, writes in place, and reads into memory.

    Views, which copy nothing, do not count.
    """
    counter = _Counter(directory)

    def counted(method: Callable[..., Any], nbytes_of: Callable[..., int]) -> Callable[..., Any]:
        def call(self: Pool, *args: Any, **kwargs: Any) -> Any:
            result = method(self, *args, **kwargs)
            counter.add(nbytes_of(*args, **kwargs))
            return result

        return call

    def of_reserved(nbytes: int, hold: object = None) -> int:
        return nbytes

    def of_read(source: Sequence[Any], destination: np.ndarray) -> int:
        return len(destination)

    # ``put`` reserves too, so a put counts once.
    Pool.reserve = counted(Pool.reserve, of_reserved)  # type: ignore[method-assign]
    Pool.read_into = counted(Pool.read_into, of_read)  # type: ignore[method-assign]
    Pool.read_batch_into = counted(Pool.read_batch_into, of_read)  # type: ignore[method-assign]


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
