"""No memory outlives a run, whatever killed it: here the driver alone, while the pool is full of samples."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.clusters import wait_until
from tests.e2e.disturbed import config_of
from tests.e2e.processes import ORPHAN_LIMIT_S, driver

pytestmark = pytest.mark.e2e


def test_nothing_is_left_of_a_run_whose_driver_is_killed(world: Path) -> None:
    with driver(config_of(world, "orphaned"), world / "orphaned.log") as victim:
        victim.wait_until(lambda: victim.num_steps >= 2, "two steps")
        victim.kill_alone()
        assert victim.wait() == -signal.SIGKILL, victim.report("it had ended before it was killed")
        segments = {name for name in victim.memory if name.startswith("/memfd:flowtrain-")}
        assert len(segments) == 3, victim.report(f"a feeder and two encoders give memory, not {segments}")
        # Ray's own agents may outlive it for minutes; they have none of its memory.
        wait_until(lambda: not victim.memory_left(), ORPHAN_LIMIT_S, lambda: victim.report(str(victim.memory_left())))


@pytest.mark.nightly
def test_a_run_that_cannot_end_within_the_grace_says_what_stands(world: Path) -> None:
    config = config_of(world, "preempted", "limits.preemption_grace_s=0.01")
    with driver(config, world / "preempted.log") as victim:
        victim.wait_until(lambda: (victim.run.checkpoints / "step-00000002").is_dir(), "a checkpoint")
        os.kill(victim.pid, signal.SIGTERM)
        assert victim.wait() == 1, victim.report("it had the time to end")
        victim.check_nothing_is_left()
        said = victim.log.read_text()
    assert "limits.preemption_grace_s (0.01 s) of SIGTERM" in said and "its last complete checkpoint, step-" in said
