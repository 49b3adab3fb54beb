"""One feeder in a process of its own, on one core, without Ray: what it delivers, takes and reads.

The benchmark runs this file once for each feeder: python _feeding_feeder.py JOB, a JSON object; it prints another. A
link answers the feeder as a coordinator whose consumers need no time: the parts of a report are released with the next
order. The clock of an epoch runs from the first order to the last report: the opening of the first blocks counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flowtrain.actors.feeder import Feeder
from flowtrain.actors.link import CoordinatorLink
from flowtrain.config.load import load_config
from flowtrain.config.run import RunConfig
from flowtrain.data.feed import sampler_from_config
from flowtrain.data.sources.source_set import SourceSet
from flowtrain.types.memory import Extent, SegmentExport
from flowtrain.types.messages import FeedOrder, FeedReport, Joined, RoomOrder
from flowtrain.types.plan import Unit, UnitKind

ROOT = Path(__file__).resolve().parents[1]
UNIT_POSITIONS = 50
"""Positions of a unit. It divides the rows of every data set of the benchmark."""
TIME_LIMIT_S = 1800


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
    """After that, until the report of the first unit: sources indexed, tokenizer loaded, pool joined."""
    resident_nbytes: int
    """The largest resident memory (VmHWM): its own, the segment, and libraries that other processes share."""
    own_nbytes: int
    """The largest of its own and the segment alone (RssAnon + RssShmem), seen every few milliseconds."""
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
    return tuple(extent for part in report.texts for extent in part.extents)


def make_feeder(config: RunConfig, job: Job) -> tuple[Feeder, Joined]:
    """Do the driver's part, and build the feeder; returns it and what the coordinator answers when it joins."""
    assert job.num_feeders == 1, "a run has one feeder"
    sampler = sampler_from_config(config, SourceSet.from_config(config.data).sizes)
    return Feeder(config, f"feeding-{os.getpid()}"), Joined(job.number, sampler.state())


def segment_nbytes(config: RunConfig) -> int:
    """The size of the feeder's segment."""
    return config.pool.text_segment_nbytes


def source_overrides(source: str, num_units: int) -> tuple[str, ...]:
    """Configuration of a run on a source, a path or a URL, with the quickstart's model and tokenizer."""
    return (
        f"data.sources=[{{path: '{source}', name: feeding}}]",
        "data.eval=null",
        f"training.global_batch_size={UNIT_POSITIONS}",
        f"training.max_steps={num_units}",
    )


def run_job(job: Job) -> Fed:
    """Run a feeder in this process."""
    imported_s = time.time()
    values = [*source_overrides(job.source, job.num_units), *job.overrides]
    config = load_config(ROOT / "configs" / "quickstart.yaml", values)
    feeder, joined = make_feeder(config, job)
    link = ReleasingLink(joined, job.num_units)
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
        start_s=link.first_report_s - imported_s,
        resident_nbytes=_status_nbytes("VmHWM"),
        own_nbytes=watch.peak_nbytes,
        segment_nbytes=segment_nbytes(config),
    )


def feed(jobs: Sequence[Job]) -> list[Fed]:
    """Run the jobs at the same time, a process each."""
    processes = []
    for job in jobs:
        text = json.dumps(asdict(job) | {"spawned_s": time.time()})
        command = ["taskset", "-c", str(job.core), sys.executable, str(Path(__file__).resolve()), text]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()))
    outputs = [process.communicate(timeout=TIME_LIMIT_S)[0] for process in processes]
    for process in processes:
        if process.returncode:
            sys.exit(f"a feeder failed with exit code {process.returncode}")
    return [Fed(**json.loads(output.splitlines()[-1])) for output in outputs]


def environment() -> dict[str, str]:
    """The environment of a process that imports this repository's package."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path), "TOKENIZERS_PARALLELISM": "false"}


class MemoryWatch:
    """Measures memory in a thread during the block."""

    INTERVAL_S = 0.01

    def __enter__(self) -> MemoryWatch:
        self.peak_nbytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self.INTERVAL_S):
            self.peak_nbytes = max(self.peak_nbytes, _status_nbytes("RssAnon") + _status_nbytes("RssShmem"))


def _status_nbytes(key: str) -> int:
    return int(_proc_value("/proc/self/status", key).removesuffix(" kB")) << 10


def _proc_value(path: str, key: str) -> str:
    with open(path) as file:
        (value,) = (line.split(":", 1)[1].strip() for line in file if line.startswith(f"{key}:"))
    return value


if __name__ == "__main__":
    values = json.loads(sys.argv[1])
    print(json.dumps(asdict(run_job(Job(**values | {"overrides": tuple(values["overrides"])})))))
