"""Processes that host emulated actors as threads. They serve many runs, so imports and starts happen once.

A host reaches the coordinator through one connection and numbers the calls of all its threads on it. The coordinator
answers on an event loop in the benchmark's own process.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

import torch

from flowtrain.actors.coordinator import Coordinator
from flowtrain.actors.feeder import Feeder
from flowtrain.actors.link import CoordinatorLink, P, Question, R
from flowtrain.data.sources.source_set import SourceSet
from flowtrain.emulation.encoder import EmulatedEncoder
from flowtrain.emulation.hosts import SWITCH_INTERVAL_S
from flowtrain.emulation.process import EmulatedProcess, EmulatedRun
from flowtrain.emulation.rank import EmulatedRank
from flowtrain.types.plan import StateOrigin

LIMIT_S = 60.0
END_S = 20.0


@dataclass(frozen=True)
class Job:
    """Emulated actors of one run: the feeder, all encoders, or all ranks."""

    role: str
    run: EmulatedRun
    run_id: str
    num_steps: int
    checkpoint_dir: str


@dataclass(frozen=True)
class Ended:
    """A host's actors have ended. error: of the first actor that failed, or None."""

    error: str | None


class HostLink(CoordinatorLink):
    """A host's link to the coordinator; any thread may use it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._numbers = count()
        self._answers: dict[int, Future[Any]] = {}

    @property
    def node_id(self) -> str:
        """All emulated devices are on one node."""
        return "emulated-node"

    def ask(self, question: Question[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Ask and wait for the answer; raises the error that the coordinator's method raised."""
        answer: Future[R] = Future()
        number = next(self._numbers)
        self._answers[number] = answer
        self.send((number, question.__name__, args, kwargs))
        return answer.result(LIMIT_S)

    def send(self, message: object) -> None:
        """Send without waiting."""
        with self._sending:
            self._connection.send(message)

    def answered(self, number: int, value: Any, error: BaseException | None) -> None:
        """Take an answer, for the call of this number."""
        answer = self._answers.pop(number)
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(value)


class Host:
    """One process for emulated actors, as the benchmark handles it."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=_host, args=(theirs,), name=f"emulated-{name}", daemon=True)
        self.process.start()
        theirs.close()
        self._loop, self._sending = loop, threading.Lock()
        self._coordinator: Coordinator | None = None
        self._ended: Future[str | None] = Future()
        threading.Thread(target=self._receive, daemon=True).start()

    def start(self, job: Job, coordinator: Coordinator) -> None:
        """Let the host run a job whose actors use this coordinator."""
        self._coordinator, self._ended = coordinator, Future()
        self._send(job)

    def wait(self, timeout_s: float) -> str | None:
        """Wait until the job's actors have ended; returns the error of one that failed, or None."""
        return self._ended.result(timeout_s)

    @property
    def failed(self) -> str | None:
        """The error of an actor that failed, or None; the others may still run."""
        return self._ended.result() if self._ended.done() else None

    @property
    def cpu_s(self) -> float:
        """Processor time of the host since its start."""
        return process_cpu_s(self.process.pid or 0)

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self.process.join(END_S)
        if self.process.is_alive():
            self.process.kill()

    def _send(self, message: object) -> None:
        with self._sending:
            self._connection.send(message)

    def _receive(self) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                if not self._ended.done():
                    self._ended.set_result(f"host {self.name} ended")
                return
            if isinstance(message, Ended):
                self._ended.set_result(message.error)
                continue
            number, method, args, kwargs = message
            answer = asyncio.run_coroutine_threadsafe(getattr(self._coordinator, method)(*args, **kwargs), self._loop)
            answer.add_done_callback(self._answering(number))

    def _answering(self, number: int) -> Callable[[Future[Any]], None]:
        def send(answer: Future[Any]) -> None:
            error = answer.exception()
            try:
                self._send((number, answer.result() if error is None else None, error))
            except OSError:
                return  # the host has ended

        return send


def process_cpu_s(pid: int) -> float:
    """Return the processor time of a process and its threads."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def machine_cpu_s() -> float:
    """Return the processor time of everything on this machine, over all cores."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, irq, softirq = map(int, file.readline().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _host(connection: Connection) -> None:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    torch.set_num_threads(1)
    link = HostLink(connection)
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            return
        if isinstance(message, Job):
            threading.Thread(target=_run_job, args=(message, link), daemon=True).start()
        else:
            link.answered(*message)


def _run_job(job: Job, link: HostLink) -> None:
    try:
        runs, abort = ACTORS[job.role](job, link)
        error = _run_all(runs, abort)
    except Exception:
        error = traceback.format_exc()
    link.send(Ended(error))


def _run_all(runs: Sequence[Callable[[], None]], abort: Callable[[], None]) -> str | None:
    """Run actors side by side; returns the error of the first that failed, or None."""
    errors: list[str] = []

    def guarded(run: Callable[[], None]) -> None:
        try:
            run()
        except Exception:
            errors.append(traceback.format_exc())
            abort()

    threads = [threading.Thread(target=guarded, args=(run,), daemon=True) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not errors:
            thread.join(0.2)
    if errors:
        time.sleep(0.1)
    return errors[0] if errors else None


Actors = tuple[Sequence[Callable[[], None]], Callable[[], None]]


def _nothing() -> None:
    """No actor in this host waits for another."""


def _feeder(job: Job, link: HostLink) -> Actors:
    config = job.run.config
    feeder = Feeder(config, job.run_id, SourceSet.index(config.data))
    return [lambda: feeder.run(link)], _nothing


def _encoders(job: Job, link: HostLink) -> Actors:
    process, config = EmulatedProcess(job.run), job.run.config
    ((name, settings),) = config.encoders.items()
    encoders = [
        EmulatedEncoder(process, index, config, name, f"encoder-{index}", job.run_id)
        for index in range(settings.data_parallel_size)
    ]
    return [lambda encoder=encoder: encoder.run(link) for encoder in encoders], _nothing


def _ranks(job: Job, link: HostLink) -> Actors:
    process, config, degrees = EmulatedProcess(job.run), job.run.config, job.run.degrees
    ranks = []
    for index in range(degrees.world_size):
        dp, pp, tp = degrees.coordinates(index)
        name = f"backbone-dp{dp}-pp{pp}-tp{tp}"
        rank = EmulatedRank(process, config, index, degrees, name, job.num_steps, job.run_id)
        rank.start("", 0, StateOrigin(), (), None)
        ranks.append(rank)
    return [lambda rank=rank: rank.run(link, 0, 0, job.checkpoint_dir, job.run_id) for rank in ranks], process.fail


ACTORS: dict[str, Callable[[Job, HostLink], Actors]] = {
    "feeder": _feeder,
    "encoders": _encoders,
    "backbone": _ranks,
}
