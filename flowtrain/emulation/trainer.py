"""What stands in for a rank's trainer, process group and checkpoints on emulated devices: there are no weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch

from flowtrain.config.run import RunConfig
from flowtrain.costs.action_times import ActionTimes
from flowtrain.emulation.meetings import Meeting, Meetings
from flowtrain.emulation.stages import EmulatedStages
from flowtrain.emulation.thread_replica import ThreadReplica
from flowtrain.models.encoder_stage import EncoderShape
from flowtrain.pipeline.actions import Action, MemoryStrategy
from flowtrain.pipeline.executor import carried_schedule, checked_schedule
from flowtrain.pipeline.partition import Partition
from flowtrain.training.optimizer import learning_rate_factor
from flowtrain.training.saver import Keep
from flowtrain.training.trainer import StepResult
from flowtrain.types.plan import Degrees, StepPlan, UnitKind

__all__ = ["EmulatedClock", "EmulatedGroup", "EmulatedSaver", "EmulatedTrainer"]


class EmulatedGroup:
    """Stands in for a rank's ``BackboneGroup``. tensor: where the ranks of its tensor parallel group meet."""

    device = torch.device("cpu")

    def __init__(self, rank: int, degrees: Degrees, tensor: ThreadReplica) -> None:
        self.rank, self.degrees, self._tensor = rank, degrees, tensor
        self.dp_rank, self.pp_rank, self.tp_rank = degrees.coordinates(rank)

    def exchange(self, data: torch.Tensor, piece: int) -> None:
        """Meet; nothing is exchanged, since all bytes are zeros and none is used."""
        self._tensor.exchange(self.tp_rank, None)

    def close(self) -> None:
        """Do nothing: no group was opened."""


class EmulatedTrainer:
    """Stands in for a rank's ``Trainer``: runs its action lists; the loss is 0, since nothing is computed."""

    recent = None
    """No loss is a spike."""

    def __init__(
        self,
        config: RunConfig,
        group: EmulatedGroup,
        partition: Partition,
        tower: EncoderShape | None,
        stages: EmulatedStages,
        times: ActionTimes,
        meetings: Meetings,
        num_steps: int,
    ) -> None:
        self._config, self.group, self._meetings, self._num_steps = config, group, meetings, num_steps
        self.stages, self._times = stages, times
        # What readers ask of a model.
        self.model = SimpleNamespace(
            partition=partition, encoder=None if tower is None else SimpleNamespace(shape=tower)
        )
        self._plan: StepPlan | None = None

    def begin_unit(self, plan: StepPlan) -> tuple[Action, ...]:
        """See ``Trainer``."""
        self._plan = plan
        training, size, partition = plan.unit.kind is UnitKind.TRAIN, plan.num_slots, self.model.partition
        carried = plan.schedules[self.group.dp_rank] if plan.schedules else ()
        if carried:
            lists = carried_schedule(carried, partition, num_microbatches=size, training=training)
        else:
            lists = checked_schedule(
                self._config.pipeline.schedule,
                partition,
                num_microbatches=size,
                training=training,
                memory=MemoryStrategy.KEEP,
            )
        actions = lists[self.group.pp_rank]
        self.stages.begin(actions)
        return actions

    def finish_unit(self) -> StepResult:
        """See ``Trainer``; the slowest rank ends the unit for all, and an update follows."""
        plan, self._plan = self._plan, None
        assert plan is not None
        clock, ranks = self.stages.clock, range(self.group.degrees.world_size)
        end = self._meetings.meet(Meeting.WORLD, self.group.rank, ranks, clock.now())
        clock.skip_to(end)
        counts = plan.num_samples, plan.num_tokens, plan.num_target_tokens
        if plan.unit.kind is UnitKind.EVAL:
            clock.wait_until(end)
            return StepResult(0.0, None, None, *counts)
        updated = clock.compute(self._times.optimizer_s(self.stages.own_work), end)
        self.stages.spans.add("optimizer", end, updated, step=plan.unit.step)
        factor = learning_rate_factor(plan.unit.step, self._num_steps, self._config.training)
        return StepResult(0.0, 0.0, self._config.training.learning_rate * factor, *counts)

    def state_is_finite(self) -> bool:
        """Nothing can diverge: there are no weights."""
        return True


class EmulatedSaver:
    """Stands in for a rank's ``CheckpointSaver``: there is nothing to save."""

    def __init__(self, step: int) -> None:
        self.step = step

    def prepare(self) -> None:
        """See ``CheckpointSaver``."""

    def save(self, step: int, directory: Path, keep: Keep | None = None, *, in_place: bool = False) -> None:
        """See ``CheckpointSaver``."""
        self.step = step

    def wait(self) -> None:
        """See ``CheckpointSaver``."""


class EmulatedClock:
    """Stands in for ``MicrobatchClock``. busy_s: seconds that the rank's device has computed so far."""

    def __init__(self, busy_s: Callable[[], float], time_scale: float) -> None:
        self._busy_s, self._time_scale = busy_s, time_scale
        self._seconds: dict[int, float] = {}

    @contextmanager
    def running(self, slot: int) -> Iterator[None]:
        """See ``MicrobatchClock``."""
        before = self._busy_s()
        yield
        self._seconds[slot] = self._seconds.get(slot, 0.0) + (self._busy_s() - before) / self._time_scale

    def times(self) -> tuple[float, ...]:
        """See ``MicrobatchClock``; in the time of the devices."""
        return tuple(self._seconds[slot] for slot in sorted(self._seconds))
