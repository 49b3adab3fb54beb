"""Times the passes of a step of the trainer's, as the executor runs them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from flowtrain.pipeline.actions import Action
from flowtrain.training.batch import PackedBatch
from flowtrain.training.profile_memory import kept_nbytes
from flowtrain.training.stages import Stages


@dataclass(frozen=True, slots=True)
class Step:
    """One measured step, in seconds."""

    microbatches_s: list[float]
    """Of each microbatch in the middle."""
    forwards_s: list[float]
    """Of their forwards."""
    beside_s: float
    """Of the step without any of its microbatches, and without what its ends take more."""
    first_s: float
    """Of its first forward, beyond the same microbatch's in the middle."""
    last_s: float
    """Of its last backward, likewise."""
    first_backward_s: float
    """What its first backward takes less than the same microbatch's in the middle; ``beside_s`` is less by it."""


class TimedStages:
    """Calls the trainer's stages, and keeps the time of each microbatch's passes through all of them."""

    def __init__(self, stages: Stages, now_s: Callable[[], float]) -> None:
        self._stages, self._now_s = stages, now_s
        self.forward_s: defaultdict[int, float] = defaultdict(float)
        self.backward_s: defaultdict[int, float] = defaultdict(float)

    def forward_stage(self, action: Action, microbatch: PackedBatch) -> None:
        """See ``StageRuntime``."""
        with self._timed(action, self.forward_s):
            self._stages.forward_stage(action, microbatch)

    def backward_stage(self, action: Action, microbatch: PackedBatch, *, is_last: bool) -> None:
        """See ``StageRuntime``."""
        with self._timed(action, self.backward_s):
            self._stages.backward_stage(action, microbatch, is_last=is_last)

    def start_transfers(self, launches: Sequence[tuple[Action, PackedBatch]]) -> None:
        """See ``StageRuntime``."""
        raise AssertionError(f"one rank alone has no transfers: {launches}")

    def wait_transfer(self, action: Action) -> None:
        """See ``StageRuntime``."""
        raise AssertionError(f"one rank alone has no transfers: {action}")

    @contextmanager
    def _timed(self, action: Action, seconds: defaultdict[int, float]) -> Iterator[None]:
        started_s = self._now_s()
        yield
        seconds[action.microbatch] += self._now_s() - started_s


class HeldStages(TimedStages):
    """Also counts the bytes that the forward of the second microbatch leaves."""

    def __init__(self, stages: Stages, now_s: Callable[[], float], device: torch.device) -> None:
        super().__init__(stages, now_s)
        self._device = device
        self.kept_nbytes = 0

    def forward_stage(self, action: Action, microbatch: PackedBatch) -> None:
        """See ``StageRuntime``."""
        if action.microbatch != 1:
            super().forward_stage(action, microbatch)
            return
        self.kept_nbytes = kept_nbytes(partial(self._stages.forward_stage, action, microbatch), self._device)
