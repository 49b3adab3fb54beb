"""A run's own actor classes on emulated devices: they wait, for the times of the emulated profile, and compute nothing.

Everything else is real: leases, decoding, the pool, prefetching, the action lists and their waits. Ranks meet at the
places of collectives: the ranks of a stage before each forward and backward (FSDP gathers parameters there), all ranks
at the end of a step. Transfers between stages take no time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch

from flowtrain.actors.backbone import BackboneRank
from flowtrain.actors.encoder import Encoder, Work
from flowtrain.config.run import RunConfig
from flowtrain.costs.profile import Profile
from flowtrain.emulation.thread_replica import ThreadChannel, ThreadReplica
from flowtrain.models.families.base import Family
from flowtrain.pipeline.actions import Action, ActionKind, MemoryStrategy, Payload
from flowtrain.pipeline.executor import checked_schedule
from flowtrain.pipeline.partition import build_partition, split_layers
from flowtrain.training.batch import PackedBatch
from flowtrain.training.mesh import BackboneGroup
from flowtrain.training.saver import CheckpointSaver
from flowtrain.training.trainer import StepResult, Trainer
from flowtrain.types.plan import Degrees, StepPlan, UnitKind

LIMIT_S = 60.0
FORWARD_SHARE = 1.0 / 3.0


class EmulatedDevice:
    """Waits instead of computing. After a late wake-up the next wait is shorter, so delays do not add up."""

    def __init__(self, time_scale: float) -> None:
        self._time_scale = time_scale
        self._late_s = 0.0

    def compute(self, seconds: float) -> None:
        """Be busy for ``seconds`` times the scale."""
        end_s = time.monotonic() + seconds * self._time_scale - self._late_s
        while (left_s := end_s - time.monotonic()) > 0.0:
            time.sleep(left_s)
        self._late_s = time.monotonic() - end_s


@dataclass(frozen=True)
class EmulatedTimes:
    """Seconds that emulated devices take, from a profile. time_scale: factor of all waits."""

    profile: Profile
    encoder: str
    time_scale: float

    def encode_s(self, num_patches: Sequence[int], tp: int) -> float:
        """Seconds of one forward over images with these numbers of patches, handling of the batch included."""
        table = self.profile.encoders[self.encoder][tp]
        count = np.full(len(num_patches), len(num_patches), dtype=np.float64)
        each = table.image_s(np.array(num_patches, dtype=np.float64), count) if len(num_patches) else np.zeros(0)
        return float(each.sum()) + self.profile.images[self.encoder].batch_s

    def microbatch_s(self, num_tokens: int, num_layers: int, tp: int, *, is_first: bool, is_last: bool) -> float:
        """Seconds of forward and backward of one packed microbatch on a pipeline stage."""
        tokens, profile = np.array([num_tokens], dtype=np.float64), self.profile
        seconds = num_layers * profile.layers[tp](tokens)
        seconds = seconds + is_first * profile.connectors[tp](tokens) + is_last * profile.heads[tp](tokens)
        return float(seconds[0]) + profile.steps.microbatch_s


class EmulatedEncoder(Encoder):
    """An encoder's tensor parallel group, as one actor."""

    def __init__(
        self, config: RunConfig, encoder: str, name: str, run_id: str, times: EmulatedTimes, tp: int, patch_size: int
    ) -> None:
        super().__init__(config, encoder, name, run_id)
        self._times, self._tp, self._patch_size = times, tp, patch_size
        self._emulated = EmulatedDevice(times.time_scale)

    def encode(self, work: Work) -> dict[int, list[torch.Tensor]]:
        """Wait as long as the forward would take; the features are zeros."""
        area = self._patch_size**2
        patches = {
            position: [array.shape[-1] * array.shape[-2] // area for array in arrays]
            for position, arrays in work.pixels.items()
            if arrays
        }
        self._emulated.compute(self._times.encode_s([count for each in patches.values() for count in each], self._tp))
        width = self._family.feature_dim(self._encoder)
        return {position: [torch.zeros(count, width) for count in each] for position, each in patches.items()}


@dataclass
class Meetings:
    """Meeting points at which the ranks of one emulated backbone wait for each other."""

    degrees: Degrees
    stages: list[threading.Barrier] = field(init=False)
    world: threading.Barrier = field(init=False)
    replicas: list[tuple[ThreadReplica, ThreadReplica, list[ThreadReplica]]] = field(init=False)
    """For each replica: its training threads, its prefetch threads, and the training threads of each stage."""

    def __post_init__(self) -> None:
        degrees = self.degrees
        self.stages = [threading.Barrier(degrees.dp * degrees.tp, timeout=LIMIT_S) for _ in range(degrees.pp)]
        self.world = threading.Barrier(degrees.world_size, timeout=LIMIT_S)
        self.replicas = [
            (
                ThreadReplica(degrees.replica_size, LIMIT_S),
                ThreadReplica(degrees.replica_size, LIMIT_S),
                [ThreadReplica(degrees.tp, LIMIT_S) for _ in range(degrees.pp)],
            )
            for _ in range(degrees.dp)
        ]
        self._arrived: set[tuple[object, ...]] = set()
        self._changed = threading.Condition()

    def send(self, key: tuple[object, ...]) -> None:
        """Announce a stage's result."""
        with self._changed:
            self._arrived.add(key)
            self._changed.notify_all()

    def receive(self, key: tuple[object, ...]) -> None:
        """Wait for another stage's result."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._arrived, LIMIT_S):
                raise TimeoutError(f"nothing was sent under {key} within {LIMIT_S:g} s")
            self._arrived.remove(key)

    def abort(self) -> None:
        """Stop all waits for a rank that failed."""
        for barrier in (*self.stages, self.world):
            barrier.abort()
        for training, reading, stages in self.replicas:
            for meeting in (training, reading, *stages):
                meeting.abort()


class EmulatedStages:
    """The executor's ``StageRuntime`` of one rank."""

    def __init__(self, rank: int, num_layers: int, meetings: Meetings, times: EmulatedTimes) -> None:
        degrees = meetings.degrees
        self._dp_rank, self._stage, self._tp_rank = degrees.coordinates(rank)
        self._degrees, self._meetings, self._times = degrees, meetings, times
        self._num_layers = len(split_layers(num_layers, degrees.pp)[self._stage])
        self.device = EmulatedDevice(times.time_scale)
        self.record = None

    def forward_stage(self, action: Action, microbatch: PackedBatch) -> None:
        """See ``StageRuntime``."""
        self._compute(microbatch, FORWARD_SHARE)

    def backward_stage(self, action: Action, microbatch: PackedBatch, *, is_last: bool) -> None:
        """See ``StageRuntime``."""
        self._compute(microbatch, 1.0 - FORWARD_SHARE)

    def start_transfers(self, launches: Sequence[tuple[Action, PackedBatch]]) -> None:
        """See ``StageRuntime``."""
        for action, _ in launches:
            if action.kind is ActionKind.ISEND:
                self._meetings.send(self._key(action, action.stage))

    def wait_transfer(self, action: Action) -> None:
        """See ``StageRuntime``."""
        if action.kind is ActionKind.WAIT_IRECV:
            sender = action.stage - 1 if action.payload is Payload.ACTIVATION else action.stage + 1
            self._meetings.receive(self._key(action, sender))

    def _key(self, action: Action, sender: int) -> tuple[object, ...]:
        return self._dp_rank, self._tp_rank, sender, action.payload, action.microbatch

    def _compute(self, batch: PackedBatch, share: float) -> None:
        self._meetings.stages[self._stage].wait()
        seconds = self._times.microbatch_s(
            len(batch.input_ids),
            self._num_layers,
            self._degrees.tp,
            is_first=self._stage == 0,
            is_last=self._stage == self._degrees.pp - 1,
        )
        self.device.compute(share * seconds)


class EmulatedTrainer:
    """Stands in for a rank's ``Trainer``, without weights."""

    def __init__(
        self, config: RunConfig, stages: EmulatedStages, pp_rank: int, meetings: Meetings, times: EmulatedTimes
    ) -> None:
        self._config, self._pp_rank, self._meetings, self._times = config, pp_rank, meetings, times
        self.stages = stages
        # What readers ask of a model: its partition, and that no encoder is inside.
        pp_size = meetings.degrees.pp
        self.model = SimpleNamespace(partition=build_partition(pp_size, pp_size), encoder=None)
        self._plan: StepPlan | None = None

    def begin_unit(self, plan: StepPlan) -> tuple[Action, ...]:
        """See ``Trainer``."""
        self._plan = plan
        lists = checked_schedule(
            self._config.pipeline.schedule,
            self.model.partition,
            num_microbatches=plan.num_slots,
            training=plan.unit.kind is UnitKind.TRAIN,
            memory=MemoryStrategy.KEEP,
        )
        return lists[self._pp_rank]

    def finish_unit(self) -> StepResult:
        """See ``Trainer``; the slowest rank ends the step for all."""
        plan, self._plan = self._plan, None
        assert plan is not None
        self._meetings.world.wait()
        self.stages.device.compute(self._times.profile.steps.step_s)
        return StepResult(0.0, 0.0, 0.0, plan.num_samples, plan.num_tokens, plan.num_target_tokens)

    def state_is_finite(self) -> bool:
        """Nothing can diverge: there are no weights."""
        return True


class EmulatedSaver:
    """Stands in for a rank's ``CheckpointSaver``: there is nothing to save."""

    def __init__(self, step: int) -> None:
        self.step = step

    def prepare(self) -> None:
        """See ``CheckpointSaver``."""

    def save(self, step: int, directory: object) -> None:
        """See ``CheckpointSaver``."""
        self.step = step

    def wait(self) -> None:
        """See ``CheckpointSaver``."""


class EmulatedGroup:
    """Stands in for a rank's process group. stage: the ranks that hold its stage."""

    device = torch.device("cpu")

    def __init__(self, degrees: Degrees, rank: int, stage: ThreadReplica) -> None:
        self.degrees, self._stage = degrees, stage
        self.dp_rank, self.pp_rank, self.tp_rank = degrees.coordinates(rank)

    def exchange(self, data: torch.Tensor, piece: int) -> None:
        """See ``BackboneGroup``."""
        self._stage.complete(self.tp_rank, data, piece)

    def close(self) -> None:
        """Do nothing: no group was opened."""


class EmulatedRank(BackboneRank):
    """A backbone rank whose stage waits instead of computing."""

    def _make_saver(self, first_step: int) -> CheckpointSaver:
        return cast(CheckpointSaver, EmulatedSaver(first_step))

    def prepare(self, family: Family, meetings: Meetings, times: EmulatedTimes) -> None:
        """Stands in for ``start``; builds no process group and no model."""
        self._eval_every = None
        replica, reading, stages_of = meetings.replicas[self._dp_rank]
        member = self._rank % self._degrees.replica_size
        self._replica, self._reading = ThreadChannel(member, replica), ThreadChannel(member, reading)
        self._family = family
        self._group = cast(BackboneGroup, EmulatedGroup(self._degrees, self._rank, stages_of[self._pp_rank]))
        num_layers = family.text_config.num_hidden_layers
        stages = EmulatedStages(self._rank, num_layers, meetings, times)
        self.trainer = cast(Trainer, EmulatedTrainer(self._config, stages, self._pp_rank, meetings, times))
