"""Drivers as processes of their own, to be killed and resumed; and what a killed one may have left behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from flowtrain.config.load import dump_resolved
from flowtrain.config.run import RunConfig
from flowtrain.observability.run_dir import RunDir, run_dir

START_LIMIT_S = 600.0
RUN_LIMIT_S = 600.0
ORPHAN_LIMIT_S = 120.0
POLL_S = 0.002
LOG_TAIL = 6000


@dataclass(frozen=True)
class Process:
    """A process that is told from a later one with the same number by when it started."""

    pid: int
    started_ticks: int
    session: int

    def is_alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        return self in processes()


def processes() -> Iterator[Process]:
    """Every running process that can be seen."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it ended in between
            if fields[0] not in "ZX":
                yield Process(int(entry.name), int(fields[19]), int(fields[3]))


def shared_memory_of(pids: set[int]) -> set[str]:
    """Names of the pool segments and of the files in /dev/shm that these processes have open or mapped."""
    names: set[str] = set()
    for pid in pids:
        try:
            held = [Path(f"/proc/{pid}/maps").read_text(), *_links_of(pid)]
        except OSError:
            continue  # it ended in between
        names.update(re.findall(r"/memfd:flowtrain-\S+|/dev/shm/\S+", "\n".join(held)))
    return names


def _links_of(pid: int) -> Iterator[str]:
    """What a process has open; files that it closes meanwhile are left out."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            yield os.readlink(link)


class Driver:
    """``flowtrain train`` in a session of its own, in which its Ray and all actors live as well.

    cold: as users start it. Otherwise Ray's workers are forks of what has imported everything. prefix: a command that
    runs the driver's, such as one that enters a namespace.
    """

    def __init__(
        self, config: RunConfig, log: Path, *arguments: str, cold: bool = False, prefix: Sequence[str] = ()
    ) -> None:
        self.run: RunDir = run_dir(config)
        self.log = log
        config_file = log.with_suffix(".yaml")
        config_file.write_text(dump_resolved(config))
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        self._directory = tempfile.mkdtemp(prefix="ft-", dir="/tmp")  # a socket's path has little room
        prefork = [] if cold else ["-m", "tests.prefork", f"{self._directory}/prefork"]
        module = ["-m", "flowtrain.cli.app"] if cold else ["flowtrain.cli.app"]
        command = [*prefix, sys.executable, *prefork, *module, "train", str(config_file), *arguments]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.memory: set[str] = set()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def num_steps(self) -> int:
        """Steps that ``metrics.jsonl`` shows."""
        return self.run.metrics.read_bytes().count(b"\n") if self.run.metrics.exists() else 0

    def unfinished_checkpoints(self) -> list[str]:
        """Checkpoints that are being written."""
        return [path.name for path in self.run.checkpoints.glob(".tmp-step-*")]

    def session(self) -> set[Process]:
        """Its living processes, those that outlived their parents too."""
        return {process for process in processes() if process.session == self._process.pid}

    def wait_until(self, happened: Callable[[], bool], what: str, limit_s: float = START_LIMIT_S) -> None:
        """Wait for something that the running driver does."""
        deadline = time.monotonic() + limit_s
        while not happened():
            code = self._process.poll()
            assert code is None, self.report(f"the driver ended with {code} before {what}")
            assert time.monotonic() < deadline, self.report(f"{what} did not happen within {limit_s:g} s")
            time.sleep(POLL_S)

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the driver's process group, as a terminal does, noting the memory that its session has."""
        self.memory |= shared_memory_of({process.pid for process in self.session()})
        os.killpg(self._process.pid, number)

    def stop(self) -> None:
        """Stop the driver, and wait until it has stopped."""
        self._process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self._process.pid}/stat")
        self.wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "its stop")

    def kill_alone(self) -> None:
        """SIGKILL to the driver and to nothing else, noting the memory that its session has."""
        self.memory |= shared_memory_of({process.pid for process in self.session()})
        self._process.kill()

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    def wait(self, limit_s: float = RUN_LIMIT_S) -> int:
        """Wait for the driver's end; returns its exit code."""
        try:
            return self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.report(f"the driver did not end within {limit_s:g} s")) from None

    def check_nothing_is_left(self) -> None:
        """No process of the session and no shared memory outlives the driver for long."""
        deadline = time.monotonic() + ORPHAN_LIMIT_S
        while left := self.session():
            assert time.monotonic() < deadline, self.report(f"processes left behind: {left}")
            time.sleep(0.1)
        assert not self.memory_left(), self.report(f"memory left behind: {self.memory_left()}")

    def memory_left(self) -> list[str]:
        """What of the noted memory some process of this machine still has, or lies in /dev/shm."""
        everybody = {process.pid for process in processes()}
        memory = {name for name in self.memory if name.startswith("/memfd:")} & shared_memory_of(everybody)
        files = {name for name in self.memory if name.startswith("/dev/shm/") and Path(name).exists()}
        return sorted(memory | files)

    def report(self, problem: str) -> str:
        """A problem with the end of the driver's log."""
        return f"{problem}\n--- end of {self.log} ---\n{self.log.read_text(errors='replace')[-LOG_TAIL:]}"

    def end(self) -> None:
        """End whatever of the session still runs."""
        for process in self.session():
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process.wait()
        shutil.rmtree(self._directory)


@contextmanager
def driver(
    config: RunConfig, log: Path, *arguments: str, cold: bool = False, prefix: Sequence[str] = ()
) -> Iterator[Driver]:
    """A driver that does not outlive the block."""
    started = Driver(config, log, *arguments, cold=cold, prefix=prefix)
    try:
        yield started
    finally:
        started.end()
