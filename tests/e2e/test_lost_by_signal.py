"""Processes that no test class can end from within: the coordinator is killed, Ray's raylet is stopped."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from flowtrain.observability.run_dir import RunDir
from tests.e2e.disturbed import NUM_STEPS, check_same_end, config_of, json_lines
from tests.e2e.processes import Driver, driver

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(900)]


def numbers_of(of: Driver, title: str) -> list[int]:
    """Processes of a driver's session whose command line contains a title."""
    found = []
    for process in of.session():
        try:
            line = Path(f"/proc/{process.pid}/cmdline").read_text()
        except OSError:
            continue  # it ended in between
        if title in line:
            found.append(process.pid)
    return found


def number_of(of: Driver, title: str) -> int:
    """The only one of them."""
    (pid,) = numbers_of(of, title)
    return pid


@pytest.mark.parametrize("every_snapshot", ["null", "1"])
def test_a_run_that_lost_its_coordinator_ends_as_the_undisturbed_one(
    world: Path, undisturbed: RunDir, every_snapshot: str
) -> None:
    name = f"headless-{every_snapshot}"
    config = config_of(world, name, f"checkpoint.snapshot_every_steps={every_snapshot}")
    with driver(config, world / f"{name}.log") as victim:
        victim.wait_until(lambda: victim.num_steps >= NUM_STEPS // 2, "half of the steps")
        os.kill(number_of(victim, "ray::Coordinator"), signal.SIGKILL)
        assert victim.wait() == 0, victim.report("the run failed")
        victim.check_nothing_is_left()
    check_same_end(victim.run, undisturbed)
    told = [line for line in json_lines(victim.run.events) if line["event"] == "restart"]
    assert [line["role"] for line in told] == ["coordinator"]


@pytest.mark.parametrize("title", ["ray::BackboneRank", "ray::Coordinator"])
def test_a_run_that_lost_its_first_start_ends_as_the_undisturbed_one(
    world: Path, undisturbed: RunDir, title: str
) -> None:
    name = f"at-start-{title.rpartition(':')[2]}"
    with driver(config_of(world, name), world / f"{name}.log") as victim:
        victim.wait_until(lambda: bool(numbers_of(victim, title)), "its start")
        os.kill(numbers_of(victim, title)[0], signal.SIGKILL)
        assert victim.num_steps == 0
        assert victim.wait() == 0, victim.report("the run failed")
        victim.check_nothing_is_left()
    check_same_end(victim.run, undisturbed)
    assert "all actors start again" in victim.log.read_text()


def test_a_run_whose_raylet_is_stopped_after_the_last_step_ends(world: Path, undisturbed: RunDir) -> None:
    with driver(config_of(world, "stopped-raylet"), world / "stopped-raylet.log") as victim:
        last = victim.run.checkpoints / f"step-{NUM_STEPS:08d}"
        victim.wait_until(last.is_dir, "the last checkpoint")
        os.kill(number_of(victim, "raylet/raylet"), signal.SIGSTOP)
        assert victim.wait() == 0, victim.report("the run failed")
        victim.check_nothing_is_left()
    check_same_end(victim.run, undisturbed)
