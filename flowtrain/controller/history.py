"""Where a run began last, and how it goes back to its last snapshot or checkpoint while it goes on."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from flowtrain.controller.commit import Committer
from flowtrain.controller.cost_keeper import CostKeeper
from flowtrain.controller.keepers import Keepers
from flowtrain.controller.opening import OpenRun
from flowtrain.controller.prepare import first_flow_settings
from flowtrain.controller.recorder import Recorder
from flowtrain.controller.resume import ResumePoint, consumed_at, find_resume_point
from flowtrain.controller.state import CANNOT_START, RestartCounts, Role
from flowtrain.errors import RunFileError
from flowtrain.training import checkpoint_store
from flowtrain.types.events import CheckpointFailed, CheckpointWritten, CostFitted, Event, SnapshotKept
from flowtrain.types.messages import FlowSettings
from flowtrain.types.plan import StateOrigin

logger = logging.getLogger(__name__)


class History:
    """What of a run is kept, and from where its processes start.

    run_id: unique to this start of the run. nonce: unique to its present ranks, so that a late write of earlier ones
    meets no directory of theirs. start: where the present processes began.
    """

    def __init__(
        self, run: OpenRun, recorder: Recorder, costs: CostKeeper, committer: Committer, keepers: Keepers
    ) -> None:
        self._run_spec, self._files = run.run_spec, run.files
        self.keepers = keepers
        self.recorder = recorder
        self.costs = costs
        self.committer = committer
        self.start = run.start
        self.run_id = self.nonce = secrets.token_hex(4)
        self.counts = RestartCounts()
        self._has_gone_back = False
        self._failed_step: int | None = None  # of the snapshot from which a start failed
        self._loss: tuple[float, str, Role, str, float | None] | None = None
        self._num_again = 0

    @property
    def _probed(self) -> Path:
        return checkpoint_store.probe_directory(self._files.checkpoints, self.nonce)

    @contextmanager
    def probed(self) -> Iterator[None]:
        """Keep a directory by which the ranks check that they share the run's file system."""
        self._probed.mkdir()
        try:
            yield
        finally:
            with suppress(FileNotFoundError):
                self._probed.rmdir()

    def take(self, event: Event) -> None:
        """Record an event, and commit checkpoints."""
        self.recorder.take(event)
        if isinstance(event, CostFitted):
            self.costs.take(event)
        elif isinstance(event, CheckpointWritten):
            self.committer.commit(event)
        elif isinstance(event, CheckpointFailed):
            self.committer.failed(event)
        elif isinstance(event, SnapshotKept):
            self.keepers.completed(event.step)

    def lost(self, name: str, role: Role, reason: str, hung_s: float | None) -> None:
        """Tell that an actor was lost for which the run must go back. hung_s: as of ``ActorLost``."""
        self.recorder.lost(name, role, reason, hung_s)
        self._loss = self._loss or (time.monotonic(), name, role, reason, hung_s)

    def blames_snapshot(self, lost: str, reason: str) -> bool:
        """Whether a start that failed would fail by the same snapshot again.

        So it is if a rank could not load it, or if ranks were lost at two starts from it. lost: the actor's name.
        """
        if not self.start.in_memory or lost == Role.COORDINATOR:
            return False
        if self.keepers.has_lost_a_node():  # a rank may have been put there, since Ray takes seconds to notice
            return False
        is_second, self._failed_step = self._failed_step == self.start.step, self.start.step
        return is_second or reason.startswith(CANNOT_START)

    def go_back(self) -> None:
        """Go back to the last snapshot or checkpoint, while no rank runs.

        Raises RunFileError if a file cannot be cut.
        """
        self.committer.forget_incomplete()
        self.start = self._snapshot_point() or find_resume_point(self._files, self._run_spec, ())
        self.keepers.keep_only(self.start.step if self.start.in_memory else None)
        self._has_gone_back = True
        self.nonce = secrets.token_hex(4)
        self._probed.mkdir()  # that of the earlier ranks was removed with other temporaries
        self.costs.rewind(self.start.cost)
        try:
            self._num_again += self.recorder.rewind(self.start.step, consumed_at(self.start))
        except OSError as error:
            raise RunFileError(
                f"the run cannot go back to step {self.start.step}: its files in {self._files.root} cannot be cut "
                f"({error.strerror or error}); make room on the disk, then start again with --resume"
            ) from error

    def _snapshot_point(self) -> ResumePoint | None:
        """Return the last snapshot, if it is newer than all checkpoints and the run's files reach it."""
        states, checkpoint = self.recorder.sampler_states, checkpoint_store.latest_complete(self._files.checkpoints)
        ended = self.recorder.ended_step  # after it evaluations may be missing
        step = max((each for each in self.keepers.complete_steps() if each in states and each <= ended), default=0)
        if step <= _step_of(checkpoint):
            return None
        try:
            self.recorder.flush(step)
        except RunFileError as error:
            logger.warning("the snapshot of step %d is not used: %s", step, error)
            return None
        checkpoint_store.remove_temporaries(self._files.checkpoints)
        return ResumePoint(
            step,
            checkpoint,
            sampler_state=states[step],
            cost=self.costs.in_use,
            gradient_reduction=self.committer.gradient_reduction,
            in_memory=True,
        )

    @property
    def has_run(self) -> bool:
        """Whether the run's processes have all started once."""
        return self.recorder.peak is not None

    @property
    def origin(self) -> StateOrigin:
        """From where ranks load their state."""
        return replace(self.start.origin, again=self._has_gone_back)

    @property
    def saved_step(self) -> int:
        """Step of the last checkpoint before the start; 0: there was none."""
        return _step_of(self.start.checkpoint)

    def went_back(self) -> float:
        """Tell that the run goes on; returns the seconds since the loss. Losses meanwhile are part of the first."""
        assert self._loss is not None
        (lost_s, name, role, reason, hung_s), self._loss = self._loss, None
        down_s = time.monotonic() - lost_s
        num_again, self._num_again = self._num_again, 0
        self.recorder.went_back(name, role, reason, down_s, num_again, hung_s)
        return down_s

    def flow_settings(self) -> FlowSettings:
        """Return where the flow starts."""
        settings = first_flow_settings(self._run_spec)
        return replace(
            settings,
            start_step=self.start.step,
            sampler_state=self.start.sampler_state or settings.sampler_state,
            cost=self.costs.in_use,
            num_rejected=self.recorder.num_rejected,
            num_seen=self.recorder.num_seen,
        )

    def end(self) -> None:
        """Complete what the last steps have left open."""
        self.committer.finish()
        if self._has_gone_back:  # a killed rank may still have written when the run went back
            checkpoint_store.remove_temporaries(self._files.checkpoints)
        if not self._run_spec.config.saves_at_end and self.recorder.last is not None:
            self.recorder.flush(self.recorder.last.step)  # otherwise a checkpoint does


def _step_of(checkpoint: Path | None) -> int:
    return 0 if checkpoint is None else checkpoint_store.read_meta(checkpoint).step
