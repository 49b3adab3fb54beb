"""Watches a run's processes from outside: processor time, memory, and bytes copied between two of its steps."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from _modes_actors import copied_nbytes

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
POLL_S = 0.05
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
        for edge in (self._first, self._last):
            while _num_lines(self._metrics) < edge:
                if self._stopping.wait(POLL_S):
                    return
            self._edges.append(Snapshot(busy_by_role(), copied_nbytes(self._counters)))
        self._peak = actors_peak_nbytes()  # after the window, since it walks all pages


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


def actors_peak_nbytes() -> int:
    """Peak memory of the living actors; what several of them map counts once (``Pss``).

    The peak of each is above its present size by the difference of its resident sizes.
    """
    total = 0
    for pid in descendants(os.getpid()):
        try:
            if role_of(pid) != OTHERS:
                now = _sizes(pid, "smaps_rollup")
                total += now["Pss"] + max(0, _sizes(pid, "status")["VmHWM"] - now["Rss"])
        except (OSError, KeyError):
            continue  # it has ended
    return total


def _sizes(pid: int, file: str) -> dict[str, int]:
    """Lines of a file under /proc that have a size, in bytes."""
    lines = (line.split() for line in Path(f"/proc/{pid}/{file}").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if words[-1] == "kB"}


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
