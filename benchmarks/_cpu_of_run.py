"""Processor seconds of a command with all processes that it starts, also those that outlive or leave their parents."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
POLL_S = 0.25
"""Of a process that its own parent has waited for, at most the time since the last look is missed."""
END_LIMIT_S = 60.0
COMMAND, OTHERS = "command", "others"
_SET_CHILD_SUBREAPER = 36  # of prctl(2)


class CpuMeter:
    """Looks at all processes beneath this one, in a thread; the last look at each of them counts."""

    def __init__(self) -> None:
        self._ticks: dict[tuple[int, str], int] = {}  # by process id and start
        self._roles: dict[tuple[int, str], str] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cpu", daemon=True)
        self._thread.start()

    def seconds_by_role(self, command: int) -> dict[str, float]:
        """User and system time so far of a process by its number, of Ray's actors by their class, and of all others."""
        found: dict[str, float] = defaultdict(float)
        for process, ticks in self._ticks.items():
            role = COMMAND if process[0] == command else self._roles.get(process, OTHERS)
            found[role] += ticks / TICKS_PER_S
        return dict(found)

    def look(self) -> set[int]:
        """Look once more; returns the processes that live."""
        living = set()
        for pid, values in _beneath_this().items():
            self._ticks[pid, values[19]] = int(values[11]) + int(values[12])
            if (role := _actor_class(pid)) is not None:
                self._roles[pid, values[19]] = role
            if values[0] != "Z":
                living.add(pid)
        return living

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopping.wait(POLL_S):
            self.look()


def cpu_seconds(command: Sequence[str], environment: Mapping[str, str], directory: Path, log: Path) -> dict[str, float]:
    """Run a command to the end of all its processes, and return their processor seconds by role, as of ``CpuMeter``.

    Raises RuntimeError, with the end of what it said, if it fails or leaves processes.
    """
    # Processes whose parent is gone become children of this one, so that none is lost.
    ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    meter = CpuMeter()
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, env=dict(environment), cwd=directory, stdout=output, stderr=subprocess.STDOUT
            )
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # what it took can still be read
        deadline = time.monotonic() + END_LIMIT_S
        while living := meter.look():
            if time.monotonic() > deadline:
                for pid in living:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                raise RuntimeError(f"processes that do not end: {sorted(living)}\n{_end_of(log)}")
            time.sleep(POLL_S)
    finally:
        meter.stop()
    meter.look()
    if process.wait():
        raise RuntimeError(f"{' '.join(command)} failed:\n{_end_of(log)}")
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return meter.seconds_by_role(process.pid)


def _actor_class(pid: int) -> str | None:
    """Return which of Ray's actors a process is, if it is one; a worker gets its name when it becomes an actor."""
    try:
        match = re.match(rb"ray::(\w+)", Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:  # it has ended
        return None
    return None if match is None else match[1].decode()


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:]


def _beneath_this() -> dict[int, list[str]]:
    """For each process beneath this one, the fields of ``/proc/<pid>/stat`` after its name."""
    found: dict[int, list[str]] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                values = Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()
            except OSError:  # it has ended
                continue
            found[int(entry)] = values
            children[int(values[1])].append(int(entry))
    beneath = list(children[os.getpid()])
    for pid in beneath:
        beneath += children[pid]
    return {pid: found[pid] for pid in beneath}
