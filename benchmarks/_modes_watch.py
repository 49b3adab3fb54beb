"""Watches a run's processes from outside: processor time, memory, and bytes copied between two of its steps."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from _modes_actors import copied_nbytes

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
POLL_S = 0.05
MEMORY_EVERY_S = 2.0
"""Reading a process's proportional memory walks its pages, so it is done rarely."""
ROLES = ("BackboneRank", "EncoderRank", "Encoder", "Feeder", "Coordinator")
OTHERS = "ray and driver"


@dataclass(frozen=True)
class Snapshot:
    """Processor seconds by role and bytes copied so far."""

    busy_s: dict[str, float]
    copied: int


@dataclass
class Watched:
    """busy_s: processor seconds by role in the window. copied: bytes in the window. peak_nbytes: of all actors."""

    busy_s: dict[str, float] = field(default_factory=dict)
    copied: int = 0
    peak_nbytes: int = 0


class RunWatcher:
    """Watches, in a thread, the processes beneath this one while a run writes its metrics.

    first, last: number of written lines at which the window begins and ends.
    """

    def __init__(self, metrics: Path, counters: Path, first: int, last: int) -> None:
        self._metrics, self._counters, self._first, self._last = metrics, counters, first, last
        self._edges: list[Snapshot] = []
        self._peak = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    def __enter__(self) -> RunWatcher:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        self._thread.join()

    def result(self) -> Watched:
        """What was seen; empty if the run ended before its window did."""
        if len(self._edges) < 2:
            return Watched(peak_nbytes=self._peak)
        start, end = self._edges
        busy = {role: end.busy_s[role] - start.busy_s.get(role, 0.0) for role in end.busy_s}
        return Watched(busy, end.copied - start.copied, self._peak)

    def _watch(self) -> None:
        looked_s = 0.0
        while not self._stopping.wait(POLL_S):
            lines = _num_lines(self._metrics)
            if len(self._edges) < 2 and lines >= (self._first, self._last)[len(self._edges)]:
                self._edges.append(Snapshot(busy_by_role(), copied_nbytes(self._counters)))
            if lines and time.monotonic() - looked_s > MEMORY_EVERY_S:
                self._peak = max(self._peak, actors_nbytes())
                looked_s = time.monotonic()


def _num_lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def busy_by_role() -> dict[str, float]:
    """Processor seconds of the living processes beneath this one, this one included, by role."""
    found: dict[str, float] = defaultdict(float)
    for pid in descendants(os.getpid()):
        try:
            values = _stat(pid)
            found[role_of(pid)] += (int(values[11]) + int(values[12])) / TICKS_PER_S
        except OSError:
            continue  # it has ended
    return dict(found)


def actors_nbytes() -> int:
    """Memory of the actors; what several of them map counts once (``Pss``)."""
    total = 0
    for pid in descendants(os.getpid()):
        try:
            if role_of(pid) != OTHERS:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                total += next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
        except (OSError, StopIteration):
            continue
    return total


def role_of(pid: int) -> str:
    """Class of the actor that a process is, by the title that Ray gives it."""
    title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return next((role for role in ROLES if role in title.split("\0")[0]), OTHERS)


def descendants(root: int) -> list[int]:
    """The process and all beneath it."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                children[int(_stat(int(entry))[1])].append(int(entry))
            except OSError:
                continue
    found = [root]
    for pid in found:
        found += children[pid]
    return found


def _stat(pid: int) -> list[str]:
    """Fields of ``/proc/<pid>/stat`` after the name, which may have spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
