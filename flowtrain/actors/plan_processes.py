"""Processes beside the coordinator that plan steps by search, so that no question to it waits for a search.

A plan is a pure function of its unit, sizes and cost, so it does not matter which process makes it. A process ends when
the coordinator's end of its pipe closes, however the coordinator ended.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from queue import SimpleQueue

from flowtrain.errors import StallError, WorkerLostError
from flowtrain.flow.steps import MadePlan, Search
from flowtrain.scheduler.sample_sizes import SampleSizes
from flowtrain.scheduler.step_planner import StepPlanner
from flowtrain.types.plan import CostModel, Unit

ANSWER_LIMIT_S = 120.0
"""The longest wait for a plan, with the start of the process; a search takes less than a second."""
_NICENESS = 10
"""Plans are made ahead, so a core is a rank's first; it leaves much of it while it waits for another rank."""

_log = logging.getLogger(__name__)


class PlanProcesses:
    """Makes plans in ``count`` processes. As ``Elsewhere``.

    planner: as the coordinator's; its cost is that of each question.
    arrival_limit_s: the longest that a step of chosen positions waits.
    """

    def __init__(self, planner: StepPlanner, count: int, arrival_limit_s: float) -> None:
        self._arrival_limit_s = arrival_limit_s
        self._free: SimpleQueue[PlanProcess] = SimpleQueue()
        for number in range(count):
            self._free.put(PlanProcess(planner, number))
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="flowtrain-plan")

    def plan(self, unit: Unit, sizes: SampleSizes, cost: CostModel) -> Search:
        """See ``Elsewhere``."""
        future = self._threads.submit(self._ask, unit, sizes, cost)
        return Search(unit.index, future, self._arrival_limit_s if unit.chosen else None)

    def _ask(self, unit: Unit, sizes: SampleSizes, cost: CostModel) -> MadePlan:
        process = self._free.get()
        try:
            return process.ask(unit, sizes, cost)
        except Exception as error:
            _log.warning("unit %d is planned by the coordinator: %s", unit.index, error)
            process.restart()
            raise
        finally:
            self._free.put(process)

    def close(self) -> None:
        """End the processes, once each has answered."""
        self._threads.shutdown(cancel_futures=True)
        while not self._free.empty():
            self._free.get().end()


class PlanProcess:
    """One process, which plans units one after another."""

    def __init__(self, planner: StepPlanner, number: int) -> None:
        self._planner, self._number = planner, number
        self._start()

    def _start(self) -> None:
        self._pipe, theirs = Pipe()
        with theirs:
            # The coordinator's own path, since Ray may have changed it; nothing is imported from the working directory.
            paths = os.pathsep.join(path for path in sys.path if path)
            command = [sys.executable, "-P", "-m", "flowtrain.actors.plan_processes", str(theirs.fileno())]
            environment = os.environ | {"PYTHONPATH": paths}
            self._process = subprocess.Popen(
                command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        self._pipe.send(self._planner)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def ask(self, unit: Unit, sizes: SampleSizes, cost: CostModel) -> MadePlan:
        """Wait for a plan. Raises WorkerLostError or StallError if none comes, or what the planner raised."""
        who = f"plan process {self._number} (pid {self.pid})"
        try:
            self._pipe.send((unit, sizes, cost))
            answer = self._pipe.recv() if self._pipe.poll(ANSWER_LIMIT_S) else None
        except (EOFError, OSError) as error:
            raise WorkerLostError(f"{who} ended") from error
        if answer is None:
            raise StallError(f"{who} did not answer within {ANSWER_LIMIT_S:g} s")
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, MadePlan)
        return answer

    def restart(self) -> None:
        """End the process and start another."""
        self.end()
        self._start()

    def end(self) -> None:
        """End the process at once."""
        self._pipe.close()
        self._process.kill()
        self._process.wait()


def serve(pipe: Connection) -> None:
    """Answer questions until the other end closes."""
    try:
        os.nice(_NICENESS)
        planner: StepPlanner = pipe.recv()
        planner.warm_up()
        while True:
            unit, sizes, cost = pipe.recv()
            started_s = time.monotonic()
            planner.cost = cost
            try:
                answer: MadePlan | Exception = MadePlan(planner.plan(unit, sizes), started_s, time.monotonic())
            except Exception as error:  # the coordinator meets the same error, and tells it
                answer = error
            pipe.send(answer)
    except (EOFError, OSError):
        return


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
