"""Processes that plan: the same plans as here, another process after a death, none left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest

from flowtrain.actors import plan_processes
from flowtrain.actors.plan_processes import PlanProcesses
from flowtrain.errors import ConfigError, StallError, WorkerLostError
from flowtrain.scheduler.sample_sizes import SampleSizes
from flowtrain.scheduler.step_planner import StepPlanner
from flowtrain.types.plan import Unit, UnitKind
from tests.search.worlds import CAPACITY, NUM_BUCKETS, drawn, make_search

pytestmark = pytest.mark.processes

LIMIT_S = 300.0
COUNT = 40


def planner_of() -> StepPlanner:
    search = make_search(2)
    limits = {"vision": 8192}
    return StepPlanner(1, CAPACITY, "best_fit", search.packing_cost, NUM_BUCKETS, "lpt", limits, 256, arrange=search)


def sizes_of(planner: StepPlanner, seed: int) -> SampleSizes:
    return planner.sizes_of(drawn(seed, COUNT))


def unit_of(index: int, chosen: tuple[int, ...] = ()) -> Unit:
    return Unit(index, UnitKind.TRAIN, index + 1, 0, COUNT, chosen=chosen)


@pytest.fixture(scope="module")
def processes() -> Iterator[PlanProcesses]:
    started = PlanProcesses(planner_of(), 2, arrival_limit_s=3.0)
    yield started
    started.close()


def test_they_plan_as_the_planner_here_does(processes: PlanProcesses) -> None:
    planner = planner_of()
    asked = [sizes_of(planner, seed) for seed in range(5)]
    searches = [processes.plan(unit_of(index), sizes, planner.cost) for index, sizes in enumerate(asked)]
    for search, sizes in zip(searches, asked, strict=True):
        made = search.future.result(LIMIT_S)
        assert made.plan == planner.plan(unit_of(search.unit_index), sizes)
        assert made.started_s <= made.finished_s and search.limit_s is None
    chosen = processes.plan(unit_of(9, tuple(range(COUNT))), asked[0], planner.cost)
    assert chosen.limit_s == 3.0, "what arrives is waited for so long at most"
    chosen.future.result(LIMIT_S)


def test_what_the_planner_raises_comes_back(processes: PlanProcesses) -> None:
    planner = planner_of()
    sizes = sizes_of(planner, 0)
    sizes.tokens[3] = 2 * CAPACITY
    with pytest.raises(ConfigError, match=rf"position 3 has {2 * CAPACITY} tokens"):
        processes.plan(unit_of(0), sizes, planner.cost).future.result(LIMIT_S)


def test_another_process_follows_one_that_was_killed() -> None:
    planner = planner_of()
    started = PlanProcesses(planner, 1, arrival_limit_s=1.0)
    try:
        sizes = sizes_of(planner, 1)
        process = started._free.get()
        pid = process.pid
        os.kill(pid, signal.SIGKILL)
        started._free.put(process)
        with pytest.raises(WorkerLostError, match=rf"plan process 0 \(pid {pid}\) ended"):
            started.plan(unit_of(0), sizes, planner.cost).future.result(LIMIT_S)
        assert started.plan(unit_of(1), sizes, planner.cost).future.result(LIMIT_S).plan.unit.index == 1
        assert process.pid != pid
    finally:
        started.close()


def test_one_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = planner_of()
    started = PlanProcesses(planner, 1, arrival_limit_s=1.0)
    try:
        sizes = sizes_of(planner, 1)
        started.plan(unit_of(0), sizes, planner.cost).future.result(LIMIT_S)
        process = started._free.get()
        os.kill(process.pid, signal.SIGSTOP)
        started._free.put(process)
        monkeypatch.setattr(plan_processes, "ANSWER_LIMIT_S", 0.2)
        with pytest.raises(StallError, match=r"did not answer within 0\.2 s"):
            started.plan(unit_of(1), sizes, planner.cost).future.result(LIMIT_S)
        monkeypatch.setattr(plan_processes, "ANSWER_LIMIT_S", LIMIT_S)
        started.plan(unit_of(2), sizes, planner.cost).future.result(LIMIT_S)
    finally:
        started.close()


def test_none_is_left_when_the_coordinator_is_killed() -> None:
    program = (
        "import sys, time\n"
        "from tests.actors.test_plan_processes import planner_of\n"
        "from flowtrain.actors.plan_processes import PlanProcesses\n"
        "started = PlanProcesses(planner_of(), 2, 1.0)\n"
        "print(*(started._free.get().pid for _ in range(2)), flush=True)\n"
        "time.sleep(1000)\n"
    )
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=root) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2 and all(is_running(pid) for pid in pids)
        parent.kill()
    deadline = time.monotonic() + LIMIT_S
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_to_close_ends_them() -> None:
    started = PlanProcesses(planner_of(), 1, arrival_limit_s=1.0)
    process = started._free.get()
    started._free.put(process)
    planner = planner_of()
    wait([started.plan(unit_of(0), sizes_of(planner, 0), planner.cost).future], LIMIT_S)
    started.close()
    assert not is_running(process.pid)
