"""Snapshots in memory: a new trainer goes on from one to the bit, and one that is gone or does not fit is refused."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from flowtrain.actors.keeper import SnapshotKeeper
from flowtrain.errors import CheckpointError, SnapshotLostError
from flowtrain.training.kept_snapshot import KeptSnapshot, read_memory, write_memory
from flowtrain.training.mesh import init_backbone_group
from flowtrain.training.snapshot import HostBuffers
from flowtrain.training.trainer import StepResult, Trainer
from flowtrain.types.memory import MemoryFile
from flowtrain.types.plan import Degrees
from tests.training.ranks import CPU, Job, TinyFamily, full_values, make_config, make_plan, run_ranks, run_unit
from tests.training.test_trainer import STEPS_DP1, STEPS_DP2

pytestmark = pytest.mark.processes

TINY = TinyFamily()
CONFIG = make_config(training={"weight_decay": 0.1})
KEPT_STEP = 2


def kept_by(trainer: Trainer, buffers: HostBuffers | None = None) -> MemoryFile:
    return write_memory("state", trainer.snapshot(buffers), trainer.described_frozen())


def go_on(trainer: Trainer, job: Job) -> tuple[list[StepResult], Any, dict[str, np.ndarray]]:
    """Results of the steps after the snapshot, a random number, and the weights."""
    later = enumerate(job.steps[KEPT_STEP:], start=KEPT_STEP + 1)
    results = [run_unit(trainer, job, make_plan(slots, step)) for step, slots in later]
    return results, torch.rand(1).item(), full_values(trainer.model, gradients=False)


def keep_and_go_on(rank: int, degrees: Degrees, host: str, port: int, listener: Any, job: Job) -> tuple[Any, Any]:
    """A rank's process: its steps after a snapshot, undisturbed and by a new trainer."""
    group = init_backbone_group(rank, degrees, CPU, host=host, port=port, listener=listener)
    trainer, keeper = Trainer(job.config, job.family, group, num_steps=10), SnapshotKeeper()
    for step, slots in enumerate(job.steps[:KEPT_STEP], start=1):
        run_unit(trainer, job, make_plan(slots, step))
    file = kept_by(trainer, HostBuffers(CPU) if rank == 0 else None)
    keeper.hold(rank, KEPT_STEP, file)
    os.close(file.fd)
    undisturbed = go_on(trainer, job)
    torch.manual_seed(99)
    kept = keeper.find(rank, KEPT_STEP)
    assert kept is not None
    again = go_on(Trainer(job.config, job.family, group, num_steps=10, resume_from=read_memory(kept)), job)
    group.close()
    return undisturbed, again


@pytest.mark.parametrize(
    ("degrees", "family"),
    [
        (Degrees(), TINY),
        (Degrees(dp=2), TINY),
        (Degrees(pp=2), TINY),
        (Degrees(tp=2), TinyFamily(num_kv_heads=2)),
        (Degrees(dp=2), TinyFamily(tied=False)),
    ],
)
def test_a_new_trainer_goes_on_to_the_bit(degrees: Degrees, family: TinyFamily) -> None:
    job = Job(CONFIG, 2 * (STEPS_DP2 if degrees.dp == 2 else STEPS_DP1), family)
    for undisturbed, again in run_ranks(degrees, job, keep_and_go_on):
        assert len(again[0]) > 1 and again[0] == undisturbed[0]
        assert again[1] == undisturbed[1], "the random state is that of the snapshot"
        assert again[2].keys() == undisturbed[2].keys()
        for name, weight in undisturbed[2].items():
            assert np.array_equal(again[2][name], weight), name


@pytest.fixture
def fresh_trainer() -> Any:
    """Trainers of this very process, on a group of one."""
    group = init_backbone_group(0, Degrees(), CPU)

    def make(family: TinyFamily = TINY, kept: KeptSnapshot | None = None) -> Trainer:
        config = make_config(model={"freeze": family.freeze}) if family.freeze else CONFIG
        return Trainer(config, family, group, num_steps=10, resume_from=kept)

    yield make
    group.close()


def test_frozen_weights_are_not_kept_but_compared(fresh_trainer: Any) -> None:
    frozen = TinyFamily(freeze=("connector",))
    trainer = fresh_trainer(frozen)
    file = kept_by(trainer)
    kept = read_memory(file)
    assert not any("connector" in name for name in kept.tensors) and list(kept.frozen) == ["connector"]
    assert fresh_trainer(frozen, kept)
    digest = kept.frozen["connector"]["digest"]
    other = replace(kept, frozen={"connector": {"digest": "2", "origin": "elsewhere"}})
    with pytest.raises(CheckpointError, match=f"frozen connector of digest 2 .* has digest {digest}"):
        fresh_trainer(frozen, other)
    os.close(file.fd)


def test_another_model_is_refused(fresh_trainer: Any) -> None:
    trainer = fresh_trainer()
    file = kept_by(trainer)
    with pytest.raises(CheckpointError, match=r"has \S+ of shape \[\d+, \d+\], the model \[\d+, \d+\]"):
        fresh_trainer(TinyFamily(hidden_size=24), read_memory(file))
    with pytest.raises(CheckpointError, match=r"do not both have model\.language_model\.lm_head\.weight"):
        fresh_trainer(TinyFamily(tied=False), read_memory(file))
    os.close(file.fd)


def test_memory_that_is_gone_or_damaged_is_refused(fresh_trainer: Any) -> None:
    trainer = fresh_trainer()
    file = kept_by(trainer)
    with pytest.raises(SnapshotLostError, match=r"the snapshot other is gone: /proc/\d+/fd/\d+ is /memfd:state"):
        read_memory(MemoryFile(file.pid, file.fd, "other"))
    os.ftruncate(file.fd, 1000)
    with pytest.raises(SnapshotLostError, match="the snapshot state cannot be read"):
        read_memory(file)
    os.close(file.fd)
    with pytest.raises(SnapshotLostError, match="the snapshot state is gone"):
        read_memory(file)
