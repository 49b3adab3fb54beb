"""One feeder in a process of its own, on one core, without Ray: what it delivers, takes and reads.

The driver (``_feeding_driver.py``) starts a process for each feeder, and sends it what an actor is given. This module
imports nothing of the driver's, so that the memory is a feeder's. It prints a JSON object. A link answers the feeder as
a coordinator whose consumers need no time: the parts of a report are released with the next order. The clock of an
epoch runs from the first order to the last report: the opening of the first blocks counts.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from flowtrain.actors.feeder import Feeder
from flowtrain.actors.link import CoordinatorLink
from flowtrain.config.run import RunConfig
from flowtrain.observability.clocks import monotonic_clock_name
from flowtrain.types.memory import Extent, SegmentExport
from flowtrain.types.messages import FeedOrder, FeedReport, Joined, RoomOrder
from flowtrain.types.plan import Unit, UnitKind
from flowtrain.types.samples import SamplerState
from flowtrain.types.sources import SourceIndex
from flowtrain.types.tracing import ClockReading

UNIT_POSITIONS = 50
"""Positions of a unit. It divides the rows of every data set of the benchmark."""


@dataclass(frozen=True)
class Job:
    """What one process does."""

    source: str
    """Path or URL."""
    num_units: int
    core: int
    overrides: tuple[str, ...] = ()
    number: int = 0
    num_feeders: int = 1
    spawned_s: float = 0.0
    """Since the Unix epoch."""


@dataclass(frozen=True)
class Given:
    """What the driver gives to a feeder."""

    config: RunConfig
    indexes: tuple[SourceIndex, ...]
    state: SamplerState
    segment_nbytes: int
    prepare_s: float
    """How long the driver took."""


@dataclass(frozen=True)
class Fed:
    """What one feeder did."""

    num_samples: int
    num_rejected: int
    seconds: float
    """From the first order to the last report."""
    cpu_s: float
    """Of the whole process, in that time."""
    read_nbytes: int
    """``rchar`` of the process, in that time: bytes that its read calls returned."""
    import_s: float
    """From the start of the process until its imports are done."""
    start_s: float
    """The driver's time to index the sources and to plan, and from the end of the imports until the report of the first
    unit: tokenizer loaded, pool joined."""
    resident_nbytes: int
    """The largest resident memory (VmHWM): its own, the segment, and libraries that other processes share."""
    own_nbytes: int
    """The largest of its own memory alone (RssAnon), seen every few milliseconds."""
    shared_nbytes: int
    """The largest part of the segment that had bytes in it (RssShmem), seen as often."""
    segment_nbytes: int

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.num_samples / self.seconds


class ReleasingLink(CoordinatorLink):
    """Gives one unit after another, and releases all parts of a report with the next order."""

    def __init__(self, joined: Joined, num_units: int) -> None:
        self._joined = joined
        self._units = [
            Unit(index, UnitKind.TRAIN, index + 1, index * UNIT_POSITIONS, UNIT_POSITIONS) for index in range(num_units)
        ]
        self._exports: list[SegmentExport] = []
        self.num_samples = self.num_rejected = 0
        self.first_report_s = 0.0
        self.begun: Usage | None = None
        self.ended: Usage | None = None

    @property
    def node_id(self) -> str:
        return "node-0"

    def ask(self, question: Callable[..., Any], *args: Any) -> Any:
        match question.__name__:
            case "join":
                return self._joined
            case "publish":
                self._exports.append(args[0])
                return None
            case "clock":
                return ClockReading(monotonic_clock_name(), time.monotonic(), 0.0)
            case "exports":
                return tuple(self._exports)
            case "feed":
                return self._feed(args[1])
            case "wait_for_room":
                return RoomOrder((), stop=self._fail("the segment is too small for the units that it holds"))
        raise AssertionError(f"the link does not answer {question.__name__}")

    def _feed(self, report: FeedReport) -> FeedOrder:
        if report.unit is not None:
            self.num_samples += len(report.sized)
            self.num_rejected += len(report.rejections)
            self.ended = Usage.now()
            self.first_report_s = self.first_report_s or time.time()
        if self.begun is None:
            self.begun = Usage.now()
        unit = self._units.pop(0) if self._units else None
        return FeedOrder(unit, (), extents_of(report), stop=unit is None)

    def _fail(self, why: str) -> bool:
        raise SystemExit(why)


@dataclass(frozen=True)
class Usage:
    """What the process has used so far."""

    clock_s: float
    cpu_s: float
    read_nbytes: int

    @classmethod
    def now(cls) -> Usage:
        """Measure it."""
        read = int(_proc_value("/proc/self/io", "rchar"))
        return cls(time.perf_counter(), time.process_time(), read)


def extents_of(report: FeedReport) -> tuple[Extent, ...]:
    """Where the parts of a report lie."""
    return tuple(extent for part in (*report.texts, *report.images) for extent in part.extents)


def run_job(job: Job, given: Given) -> Fed:
    """Run a feeder in this process."""
    imported_s = time.time()
    run_id = f"feeding-{os.getpid()}"
    feeder = Feeder(given.config, run_id, given.indexes, job.number, job.num_feeders, given.segment_nbytes)
    link = ReleasingLink(Joined(job.number, given.state), job.num_units)
    with MemoryWatch() as watch:
        feeder.run(link)
    assert link.begun is not None and link.ended is not None
    return Fed(
        num_samples=link.num_samples,
        num_rejected=link.num_rejected,
        seconds=link.ended.clock_s - link.begun.clock_s,
        cpu_s=link.ended.cpu_s - link.begun.cpu_s,
        read_nbytes=link.ended.read_nbytes - link.begun.read_nbytes,
        import_s=imported_s - job.spawned_s,
        start_s=given.prepare_s + link.first_report_s - imported_s,
        resident_nbytes=_status_nbytes("VmHWM"),
        own_nbytes=watch.own_nbytes,
        shared_nbytes=watch.shared_nbytes,
        segment_nbytes=given.segment_nbytes,
    )


class MemoryWatch:
    """Measures memory in a thread during the block."""

    INTERVAL_S = 0.01

    def __enter__(self) -> MemoryWatch:
        self.own_nbytes = self.shared_nbytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self.INTERVAL_S):
            self.own_nbytes = max(self.own_nbytes, _status_nbytes("RssAnon"))
            self.shared_nbytes = max(self.shared_nbytes, _status_nbytes("RssShmem"))


def _status_nbytes(key: str) -> int:
    return int(_proc_value("/proc/self/status", key).removesuffix(" kB")) << 10


def _proc_value(path: str, key: str) -> str:
    with open(path) as file:
        (value,) = (line.split(":", 1)[1].strip() for line in file if line.startswith(f"{key}:"))
    return value


if __name__ == "__main__":
    job, given = pickle.load(sys.stdin.buffer)
    print(json.dumps(asdict(run_job(job, given))))
