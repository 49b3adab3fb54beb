"""Runs the trainer's stages over fetched microbatches and measures the time of each microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from flowtrain.actors.reading import Fetched
from flowtrain.actors.whereabouts import Diary
from flowtrain.pipeline.actions import Action
from flowtrain.pipeline.executor import StageRuntime
from flowtrain.training.batch import PackedBatch
from flowtrain.training.clock import MicrobatchClock


class TimedStages:
    """Passes a microbatch's batch on; forward and backward count towards its slot. clock None: nothing is timed.

    diary: notes each action.
    """

    def __init__(self, stages: StageRuntime[PackedBatch], clock: MicrobatchClock | None, diary: Diary) -> None:
        self._stages = stages
        self._clock = clock
        self._diary = diary

    def forward_stage(self, action: Action, microbatch: Fetched) -> None:
        """See ``StageRuntime``."""
        self._diary.begin(action)
        with self._timed(microbatch):
            self._stages.forward_stage(action, microbatch.batch)

    def backward_stage(self, action: Action, microbatch: Fetched, *, is_last: bool) -> None:
        """See ``StageRuntime``."""
        self._diary.begin(action)
        with self._timed(microbatch):
            self._stages.backward_stage(action, microbatch.batch, is_last=is_last)

    def start_transfers(self, launches: Sequence[tuple[Action, Fetched]]) -> None:
        """See ``StageRuntime``."""
        self._diary.begin(launches[0][0])
        self._stages.start_transfers([(action, microbatch.batch) for action, microbatch in launches])

    def wait_transfer(self, action: Action) -> None:
        """See ``StageRuntime``."""
        self._diary.begin(action)
        self._stages.wait_transfer(action)

    def _timed(self, microbatch: Fetched) -> AbstractContextManager[None]:
        return self._clock.running(microbatch.slot) if self._clock is not None else nullcontext()
