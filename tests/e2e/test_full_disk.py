"""A disk without room for a checkpoint: training goes on, and only the last checkpoint can end the run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from flowtrain.config.run import RunConfig
from tests.e2e.disturbed import EVERY_CHECKPOINT, config_of
from tests.e2e.processes import driver

pytestmark = pytest.mark.e2e

DISK_MIB, BALLAST_MIB = 48, 46
"""A checkpoint of the tiny model has about 4 MiB."""
NUM_STEPS = 8


@dataclass(frozen=True)
class SmallDisk:
    """A tmpfs in a mount namespace of its own, which lives as long as its holder."""

    holder: int
    directory: Path

    @property
    def outside(self) -> Path:
        """The disk, as processes outside of the namespace reach it."""
        return Path(f"/proc/{self.holder}/root") / self.directory.relative_to("/")

    @property
    def prefix(self) -> list[str]:
        """Runs a command inside, in this directory."""
        enter = ["nsenter", f"--target={self.holder}", "--mount"]
        return [*enter, "sh", "-c", f'cd "{os.getcwd()}" && exec "$@"', "sh"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A disk on which a checkpoint has no room until its ballast is gone."""
    fill = f"dd if=/dev/zero of={tmp_path}/ballast bs=1M count={BALLAST_MIB} status=none"
    script = f"mount -t tmpfs -o size={DISK_MIB}m tmpfs {tmp_path} && {fill} && echo ready && exec sleep 600"
    try:
        holder = subprocess.Popen(["unshare", "--mount", "sh", "-c", script], stdout=subprocess.PIPE, text=True)
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    with holder:
        assert holder.stdout is not None
        if holder.stdout.readline() != "ready\n":
            pytest.skip("no tmpfs can be mounted in a namespace (that needs root)")
        yield SmallDisk(holder.pid, tmp_path)
        holder.kill()


def config_on(disk: SmallDisk, world: Path, name: str) -> RunConfig:
    return config_of(world, name, f"runs_dir={disk.directory}", f"training.max_steps={NUM_STEPS}")


def test_training_goes_on_and_the_next_checkpoint_succeeds(world: Path, disk: SmallDisk) -> None:
    log = world / "full.log"
    with driver(config_on(disk, world, "full"), log, prefix=disk.prefix) as running:
        running.wait_until(lambda: f"step {EVERY_CHECKPOINT} was not written" in log.read_text(), "a full disk")
        (disk.outside / "ballast").unlink()
        assert running.wait() == 0, running.report("the run did not survive a full disk")
        running.check_nothing_is_left()
    said = " ".join(log.read_text().split())
    assert "No space left on device" in said and f"bytes are free in {disk.directory}" in said
    assert "training goes on, and the next checkpoint tries again" in said
    kept = sorted(path.name for path in (disk.outside / "full" / "checkpoints").iterdir())
    assert kept[-1] == f"step-{NUM_STEPS:08d}" and all(name.startswith("step-") for name in kept)
    metrics = (disk.outside / "full" / "metrics.jsonl").read_text().splitlines()
    assert len(metrics) == NUM_STEPS


@pytest.mark.nightly
def test_a_run_whose_last_checkpoint_has_no_room_ends_with_an_error(world: Path, disk: SmallDisk) -> None:
    log = world / "never.log"
    with driver(config_on(disk, world, "never"), log, prefix=disk.prefix) as running:
        assert running.wait() == 1, running.report("nothing of the run is kept, and it says nothing")
        running.check_nothing_is_left()
    said = " ".join(log.read_text().split())
    assert f"the last checkpoint, of step {NUM_STEPS}, could not be written, also at a second try" in said
    assert "Traceback" not in said
    assert not list((disk.outside / "never" / "checkpoints").iterdir())
