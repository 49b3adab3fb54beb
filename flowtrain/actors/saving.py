"""Saves one rank's state where a unit ends: checkpoints on disk, snapshots in its node's memory."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from flowtrain.actors.keeper import Keeper
from flowtrain.actors.link import CoordinatorLink
from flowtrain.config.training import CheckpointConfig
from flowtrain.errors import CheckpointError, ConfigError, SnapshotLostError
from flowtrain.flow.api import CoordinatorApi
from flowtrain.flow.units import ends_step
from flowtrain.training.checkpoint_store import temporary_directory
from flowtrain.training.kept_snapshot import write_memory
from flowtrain.training.mesh import BackboneGroup
from flowtrain.training.saver import CheckpointSaver, Keep, Report, lacking_memory
from flowtrain.training.snapshot import Snapshot
from flowtrain.training.trainer import Trainer
from flowtrain.types.evaluation import EvalRounds
from flowtrain.types.plan import Unit

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Health(Protocol):
    """What may be saved, see ``TrainingHealth``; collective."""

    def may_save(self, step: int) -> bool:
        """Whether the state after ``step`` may become a checkpoint."""

    def may_keep(self) -> bool:
        """Whether the state may become a snapshot."""


class Snapshots:
    """Puts snapshots of one rank into its node's memory.

    name: what names of memory begin with. complete: step of the snapshot from which the ranks started; None: of none.
    """

    def __init__(
        self,
        every_steps: int,
        trainer: Trainer,
        group: BackboneGroup,
        link: CoordinatorLink,
        keeper: Keeper,
        name: str,
        complete: int | None = None,
    ) -> None:
        self.every_steps = every_steps
        self._trainer, self._group = trainer, group
        self._link, self._keeper, self._name, self._complete = link, keeper, name, complete
        self._problem: str | None = None  # of the last one

    def check_room(self) -> None:
        """Raise ConfigError unless each node has room for two snapshots of its ranks; collective."""
        lacking = lacking_memory(2 * self._trainer.state_nbytes(), self._group)
        if lacking is not None:
            raise ConfigError(
                f"checkpoint.snapshot_every_steps ({self.every_steps}) keeps two snapshots in the memory of a node, "
                f"which need {lacking}; set it to null, so that a backbone that loses a rank starts again from the "
                "last checkpoint, or use fewer ranks a node"
            )

    def keep(self, step: int, snapshot: Snapshot) -> None:
        """Keep a snapshot, and report when all ranks have; collective over the checkpoint group.

        Does nothing while the last one is still copied to another node, so that a node holds two at most. If a rank
        cannot keep it, rank 0 logs it once, and the next snapshot is tried.
        """
        frozen = self._trainer.described_frozen()  # collective, so before a rank may fail
        if not all(self._gathered(self._is_free())):
            return
        every = self._gathered(self._held(step, snapshot, frozen))
        problem = next((f"rank {rank}: {each}" for rank, each in enumerate(every) if each is not None), None)
        if problem is None:
            self._complete = step
        else:
            self._give_up(step)
        if not self._group.rank:
            self._report(step, problem)
        self._problem = problem

    def _report(self, step: int, problem: str | None) -> None:
        if problem is None:
            self._link.ask(CoordinatorApi.snapshot_kept, step)
        if problem is not None and self._problem is None:
            logger.warning(
                "no snapshot of step %d: %s; training goes on, and the next one is tried; until then a backbone that "
                "loses a rank starts again from an earlier snapshot or checkpoint",
                step,
                problem,
            )
        elif problem is None and self._problem is not None:
            logger.warning("snapshots are kept again, from step %d on", step)

    def _gathered(self, mine: T) -> list[T]:
        """Return what all ranks have, by rank; collective."""
        every = [mine] * self._group.world_size
        dist.all_gather_object(every, mine, group=self._group.checkpoint_group)
        return every

    def _is_free(self) -> bool:
        try:
            return self._keeper.is_free(self._group.rank)
        except Exception:  # others wait for this rank's answer, and the attempt to keep one says why it fails
            return True

    def _give_up(self, step: int) -> None:
        with suppress(SnapshotLostError):  # a keeper that died has nothing to give up
            self._keeper.give_up(self._group.rank, step)

    def _held(self, step: int, snapshot: Snapshot, frozen: Mapping[str, Any]) -> str | None:
        """Let the node's keeper hold a snapshot; returns why it does not."""
        try:
            self._keeper.make_room(self._group.rank, self._complete)
            file = write_memory(f"{self._name}-{step}", snapshot, frozen)
            try:
                self._keeper.hold(self._group.rank, step, file)
            finally:
                os.close(file.fd)
        except Exception as error:  # others wait for this rank's answer, and training needs no snapshot
            return f"{type(error).__name__}: {error}"
        return None


class RankSaves:
    """Saves one rank's state; all ranks call the same methods in the same order.

    make_saver: gets what is called when a save has ended. evaluations: of each held-out set; what is due waits for
    those after its step. directory, nonce: temporaries of checkpoints lie in the directory, with the nonce in their
    names. begin: notes what begins. num_steps: of the run. snapshots: None: there are none.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        make_saver: Callable[[Report], CheckpointSaver],
        link: CoordinatorLink,
        rank: int,
        evaluations: tuple[EvalRounds, ...],
        directory: Path,
        nonce: str,
        begin: Callable[[str], None],
        num_steps: int,
        snapshots: Snapshots | None = None,
    ) -> None:
        self._num_steps = num_steps
        self._config, self._link, self._rank = config, link, rank
        self._evaluations, self._directory, self._nonce = evaluations, directory, nonce
        self._begin, self._snapshots = begin, snapshots
        self._saver = make_saver(self._report)
        self._is_due = self._is_snapshot_due = False
        self._began_s: dict[int, float] = {}  # when the save of a step began

    def prepare(self, step: int) -> None:
        """Prepare after ``step`` for copies, if any come; the state at the end of the run is written without."""
        every = self._config.every_steps if self._snapshots is None else self._snapshots.every_steps
        next_step = step if not step % every else step - step % every + every
        if next_step < self._num_steps:
            self._saver.prepare()

    def after_unit(self, unit: Unit, health: Health, is_last: bool) -> None:
        """Save what is due; collective. is_last: no unit follows, so a checkpoint comes anyway."""
        self._is_due |= unit.step % self._config.every_steps == 0
        if self._snapshots is not None:
            self._is_snapshot_due |= unit.step % self._snapshots.every_steps == 0
        if not ends_step(self._evaluations, unit):
            return
        if self._is_due:
            if health.may_save(unit.step):
                self._begin("a checkpoint")
                keep = None if self._snapshots is None or is_last else self._snapshots.keep
                self._save(unit.step, keep, in_place=is_last)
                self._is_due = self._is_snapshot_due = False
        elif self._snapshots is not None and self._is_snapshot_due and not is_last:
            self._begin("a snapshot")
            if self._saver.is_free() and health.may_keep():
                self._saver.keep(unit.step, self._snapshots.keep)
                self._is_snapshot_due = False

    def at_end(self, step: int) -> None:
        """Save the state at the end of the run; once more if that fails, since nothing of the run would be kept.

        Raises CheckpointError.
        """
        problem = None
        for _ in range(2):
            self._save(step, in_place=True)
            if (problem := self._saver.wait()) is None:
                return
        raise CheckpointError(
            f"the last checkpoint, of step {step}, could not be written, also at a second try: {problem}; make room "
            "there, then go on from the checkpoint before with --resume"
        )

    def wait(self) -> int:
        """Wait for the checkpoint that is being written; returns the step of the last one that was."""
        self._saver.wait()
        return self._saver.step

    def _save(self, step: int, keep: Keep | None = None, *, in_place: bool = False) -> None:
        """Save this rank's share of the state after ``step``, once; the driver commits the checkpoint."""
        if step > self._saver.step:
            self._began_s[step] = time.monotonic()
            directory = temporary_directory(self._directory, step, self._nonce)
            self._saver.save(step, directory, keep, in_place=in_place)

    def _report(self, step: int, directory: Path, problem: str | None) -> None:
        """Tell the driver how a save ended; called in the thread that wrote."""
        duration_s = time.monotonic() - self._began_s.pop(step)
        if self._rank != 0:
            return
        if problem is None:
            self._link.ask(CoordinatorApi.checkpoint_written, step, str(directory), duration_s)
        else:
            self._link.ask(CoordinatorApi.checkpoint_failed, step, problem)
