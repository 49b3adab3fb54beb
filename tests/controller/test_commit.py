"""Checkpoints become complete once metrics and ledger cover them, also on a disk that was full meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowtrain.controller.commit import Committer
from flowtrain.errors import CheckpointError, RunFileError
from flowtrain.observability.run_dir import RunDir
from flowtrain.training import checkpoint_store
from flowtrain.training.checksums import FileSum, write_sums
from flowtrain.types.events import CheckpointFailed, CheckpointWritten
from flowtrain.types.run_events import CheckpointFinished
from flowtrain.types.samples import SamplerState
from tests.controller.test_cost_keeper import SPEC
from tests.controller.test_recorder import make_prepared


class World:
    """A committer whose recorder and costs refuse to write for as long as the disk is full."""

    def __init__(self, root: Path, keep_best: str | None = None, losses: Mapping[int, float] = {}) -> None:
        self.files = RunDir(root)
        self.is_full = False
        self.notes: list[str] = []
        recorder = SimpleNamespace(
            flush=self._write,
            sampler_states={step: SamplerState(step) for step in range(9)},
            forget_before=lambda s: None,
            eval_metrics=lambda s: {"eval_loss": losses[s]} if s in losses else {},
        )
        costs: Any = SimpleNamespace(write=self._write, in_use=make_prepared().cost)
        run_spec = replace(make_prepared(), model_spec=SPEC)
        checkpoint = run_spec.config.checkpoint.model_copy(update={"keep": 1, "keep_best": keep_best})
        if keep_best is not None:
            run_spec = replace(run_spec, config=run_spec.config.model_copy(update={"checkpoint": checkpoint}))
        self.completed: list[CheckpointFinished] = []
        self.committer = Committer(run_spec, self.files, recorder, costs, self.notes.append, self.completed.append)  # type: ignore[arg-type]

    def _write(self, step: int | None = None) -> None:
        if self.is_full:
            raise RunFileError("metrics.jsonl cannot be written: No space left on device")

    def commit(self, step: int) -> None:
        directory = checkpoint_store.temporary_directory(self.files.checkpoints, step, "run")
        directory.mkdir(parents=True)
        (directory / "shard").write_bytes(b"weights")
        self.committer.commit(CheckpointWritten(step, str(directory)))

    def names(self) -> list[str]:
        return sorted(path.name for path in self.files.checkpoints.iterdir())


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_checkpoint_that_the_audit_does_not_cover_is_not_complete_and_the_next_one_is(world: World) -> None:
    world.commit(2)
    world.is_full = True
    world.commit(4)
    assert checkpoint_store.latest_complete(world.files.checkpoints) == world.files.checkpoints / "step-00000002"
    (note,) = world.notes
    assert "checkpoint of step 4 is not complete" in note and "No space left" in note and "training goes on" in note
    world.is_full = False
    world.commit(6)
    assert world.names() == ["step-00000002", "step-00000006"], "what was replaced takes no room"
    world.committer.finish()


def test_the_last_checkpoint_is_tried_again_at_the_end(world: World) -> None:
    world.is_full = True
    world.commit(4)
    world.is_full = False
    world.committer.finish()
    assert world.names() == ["step-00000004"]


def test_a_run_whose_last_checkpoint_cannot_become_complete_fails_with_the_reason(world: World) -> None:
    world.commit(2)
    world.is_full = True
    world.commit(4)
    with pytest.raises(CheckpointError, match=r"of step 4, could not be made complete.*No space.*from .*step-00000002"):
        world.committer.finish()


def test_a_checkpoint_that_lost_a_file_does_not_end_training(world: World) -> None:
    directory = checkpoint_store.temporary_directory(world.files.checkpoints, 2, "run")
    directory.mkdir(parents=True)
    write_sums(directory, {"shard": FileSum(7, "00000000")})
    world.committer.commit(CheckpointWritten(2, str(directory)))
    (note,) = world.notes
    assert "checkpoint of step 2 is not complete" in note and "shard has no file where 7 bytes" in note
    with pytest.raises(CheckpointError, match="of step 2, could not be made complete"):
        world.committer.finish()
    world.commit(4)
    assert world.names() == ["step-00000004"]


def test_a_checkpoint_that_ranks_could_not_write_is_said_and_makes_room(world: World) -> None:
    world.is_full = True
    world.commit(2)
    assert world.names() == [".tmp-step-00000002-run"]
    world.committer.failed(CheckpointFailed(4, "rank 1: no room; the checkpoint needs 9 bytes, 3 bytes are free in x"))
    assert world.names() == [], "the one before holds the room that the next one needs"
    assert world.notes[-1].startswith(
        "the checkpoint of step 4 was not written: rank 1: no room; the checkpoint needs 9"
    )
    assert "training goes on, and the next checkpoint tries again" in world.notes[-1]
    world.is_full = False
    world.commit(6)
    world.committer.finish()
    assert world.names() == ["step-00000006"]


def test_the_best_checkpoint_stays_beside_the_newest_and_is_told(tmp_path: Path) -> None:
    world = World(tmp_path, "eval_loss", {2: 0.5, 4: 0.25, 6: 0.75, 8: 0.25})
    kept = []
    for step in (1, 2, 4, 6, 8):
        world.commit(step)
        kept.append([int(name.removeprefix("step-")) for name in world.names()])
    assert kept == [[1], [2], [4], [4, 6], [4, 8]], "1 has no loss, and 8 is not better than 4"
    assert [event.best_of for event in world.completed] == [None, "eval_loss", "eval_loss", None, None]
    (best, *_) = checkpoint_store.best_first(world.files.checkpoints, "eval_loss")
    assert checkpoint_store.read_meta(best).metrics == {"eval_loss": 0.25}
