"""Where a run began last, and how it goes back to its last checkpoint while it goes on."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from flowtrain.controller.commit import Committer
from flowtrain.controller.cost_keeper import CostKeeper
from flowtrain.controller.opening import OpenRun
from flowtrain.controller.prepare import first_flow_settings
from flowtrain.controller.recorder import Recorder
from flowtrain.controller.resume import consumed_at, find_resume_point
from flowtrain.training import checkpoint_store
from flowtrain.types.events import CheckpointFailed, CheckpointWritten, CostFitted, Event
from flowtrain.types.messages import FlowSettings


class History:
    """What of a run is kept, and from where its processes start.

    run_id: unique to this start of the run. start: where its present processes began.
    """

    def __init__(self, run: OpenRun, recorder: Recorder, costs: CostKeeper, committer: Committer) -> None:
        self._run_spec, self._files = run.run_spec, run.files
        self.recorder = recorder
        self.costs = costs
        self.committer = committer
        self.start = run.start
        self.run_id = secrets.token_hex(4)
        self._probed = checkpoint_store.probe_directory(run.files.checkpoints, self.run_id)

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

    def go_back(self) -> int:
        """Go back to the last checkpoint, while no rank runs; returns the number of steps that are done again."""
        self.committer.forget_incomplete()
        self.start = find_resume_point(self._files, self._run_spec, ())
        self._probed.mkdir(exist_ok=True)  # it was removed with other temporaries
        self.costs.rewind(self.start.cost)
        return self.recorder.rewind(self.start.step, consumed_at(self.start))

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
        if not self._run_spec.config.saves_at_end and self.recorder.last is not None:
            self.recorder.flush(self.recorder.last.step)  # otherwise a checkpoint does
