"""Killed, stopped and resumed runs end as the undisturbed run does, to the bit, and leave nothing behind."""

from __future__ import annotations

import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from flowtrain.controller.run import run_training
from flowtrain.observability.ledger import read_ledger
from flowtrain.observability.run_dir import RunDir, run_dir
from tests.e2e.disturbed import (
    BF16_STEPS,
    NUM_STEPS,
    OVERSIZED_ROWS,
    TRUNCATED_ROWS,
    bf16_config,
    check_same_end,
    config_of,
    exact_metrics,
)
from tests.e2e.processes import Driver, driver

pytestmark = pytest.mark.e2e

EXIT_STOPPED = 130


def test_the_undisturbed_run_meets_what_the_others_are_compared_in(undisturbed: RunDir) -> None:
    check_same_end(undisturbed, undisturbed)
    ledger = read_ledger(undisturbed.ledger).to_pylist()
    assert {row["row"] for row in ledger if row["state"] == "rejected"} == {*TRUNCATED_ROWS, *OVERSIZED_ROWS}
    assert {row["epoch"] for row in ledger} == {0, 1}
    losses = [line["loss"] for line in exact_metrics(undisturbed)]
    assert losses[-1] < losses[0] and len(set(losses)) == NUM_STEPS


def kill_at_a_random_moment(victim: Driver, rng: random.Random) -> None:
    """SIGKILL some time after a few more steps."""
    enough = victim.num_steps + rng.randint(2, 4)
    victim.wait_until(lambda: victim.num_steps >= enough, "a few steps")
    time.sleep(rng.uniform(0.0, 0.2))
    victim.signal_group(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL, victim.report("it had ended before it was killed")


def kill_in_a_checkpoint(victim: Driver) -> None:
    """SIGKILL while a checkpoint is written, which then stays unfinished."""
    # The driver completes checkpoints: stopped, it leaves one unfinished until it is killed.
    victim.wait_until(lambda: bool(victim.unfinished_checkpoints()), "a checkpoint")
    victim.stop()
    while not victim.unfinished_checkpoints():
        victim.signal_group(signal.SIGCONT)
        victim.wait_until(lambda: bool(victim.unfinished_checkpoints()), "a checkpoint")
        victim.stop()
    victim.signal_group(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL, victim.report("it had ended before it was killed")
    assert victim.unfinished_checkpoints(), victim.report("the checkpoint was complete before the kill")


def interrupt(victim: Driver) -> None:
    """Ctrl-C; the run ends by itself with a checkpoint of its last step."""
    first = victim.num_steps
    victim.wait_until(lambda: victim.num_steps >= first + 1, "a step")
    victim.signal_group(signal.SIGINT)
    assert victim.wait() == EXIT_STOPPED, victim.report("an interrupted run ends with 130")
    assert 0 < victim.num_steps < NUM_STEPS, victim.report("it was to be stopped on its way")
    assert victim.unfinished_checkpoints() == []
    last = max(path.name for path in victim.run.checkpoints.iterdir())
    assert last == f"step-{victim.num_steps:08d}", victim.report("no checkpoint of the last step")


def flip_a_bit(victim: Driver) -> str:
    """Change the last checkpoint as a bad disk does; returns its name."""
    last = max(victim.run.checkpoints.glob("step-*"))
    shard = last / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    return last.name


def test_killed_and_stopped_runs_end_as_the_undisturbed_one(world: Path, undisturbed: RunDir) -> None:
    config = config_of(world, "disturbed")
    rng = random.Random(11)
    with driver(config, world / "killed.log") as first:
        kill_at_a_random_moment(first, rng)
        # Resumed at once, while actors of the killed run may still be on their way out, and with more feeders.
        two_feeders = config_of(world, "disturbed", "data.num_feeders=2")
        with driver(two_feeders, world / "killed-in-checkpoint.log", "--resume") as second:
            kill_in_a_checkpoint(second)
            first.check_nothing_is_left()
            three_feeders = config_of(world, "disturbed", "data.num_feeders=3")
            with driver(three_feeders, world / "interrupted.log", "--resume") as third:
                interrupt(third)
                second.check_nothing_is_left()
                third.check_nothing_is_left()
    corrupt = flip_a_bit(third)
    with driver(config, world / "resumed.log", "--resume") as last:
        assert last.wait() == 0, last.report("the resumed run failed")
        last.check_nothing_is_left()
    said = " ".join((world / "resumed.log").read_text().split())
    assert f"{corrupt} is corrupt and is not used: __1_0.distcp has CRC-32 " in said, last.report("a silent resume")
    (aside,) = last.run.checkpoints.glob(f"corrupt-{corrupt}-*")
    shutil.rmtree(aside)
    check_same_end(last.run, undisturbed)


def test_a_run_is_interrupted_while_it_starts(world: Path) -> None:
    config = config_of(world, "early")
    with driver(config, world / "early.log", cold=True) as early:
        early.wait_until(lambda: len(early.session()) > 1, "the start of Ray")
        early.signal_group(signal.SIGINT)
        assert early.wait() == EXIT_STOPPED, early.report("an interrupted run ends with 130")
        early.check_nothing_is_left()
        assert early.num_steps == 0


@pytest.mark.nightly
def test_a_killed_bf16_run_ends_as_the_undisturbed_one(world: Path, ray_cluster: None) -> None:
    undisturbed = bf16_config(world, "bf16-undisturbed")
    run_training(undisturbed)
    config = bf16_config(world, "bf16")
    with driver(config, world / "bf16-killed.log") as killed:
        kill_at_a_random_moment(killed, random.Random(5))
        with driver(config, world / "bf16-resumed.log", "--resume") as resumed:
            assert resumed.wait() == 0, resumed.report("the resumed run failed")
        killed.check_nothing_is_left()
    check_same_end(run_dir(config), run_dir(undisturbed), BF16_STEPS)
