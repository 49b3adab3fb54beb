"""Seconds of each action of a rank: computing a stage, gathering and reducing over replicas, sending, updating.

The work of one microbatch is a ``Workload`` of its own, so a stage's time comes from the same ``ModuleTimes`` as a plan's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from flowtrain.costs.activations import layer_activation_nbytes
from flowtrain.costs.cluster import DeviceType
from flowtrain.costs.communication import TensorCommunication
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.costs.module_times import ModuleTimes
from flowtrain.costs.profile import Profile
from flowtrain.costs.profiled_times import ProfileTimes
from flowtrain.costs.roofline import Efficiency, Roofline
from flowtrain.costs.training_setup import FLOAT32_NBYTES, TrainingSetup
from flowtrain.costs.workload import Workload
from flowtrain.types.plan import Degrees

FORWARD_SHARE = 1.0 / 3.0
"""Of the time of forward and backward."""
_MANY_TOKENS = 1 << 16
"""Bytes per token are taken from so many, since slices are whole tokens."""


@dataclass(frozen=True)
class DeviceTimes:
    """Times of any work on one type of device, by data sheet or by a profile."""

    device: DeviceType
    model: ModelSpec
    setup: TrainingSetup
    freeze: tuple[str, ...]
    profile: Profile | None = None
    max_batch_patches: Mapping[str, int] = field(default_factory=dict)
    decode_threads: Mapping[str, int] = field(default_factory=dict)
    efficiency: Efficiency = Efficiency()

    def of(self, workload: Workload) -> ModuleTimes:
        """Return the times for a workload."""
        if self.profile is None:
            return Roofline(self.device, self.model, workload, self.setup, self.efficiency)
        efficiency = self.efficiency.links
        communication = TensorCommunication(self.device, self.model, workload, self.setup, efficiency)
        return ProfileTimes(self.profile, workload, communication, self.max_batch_patches, self.decode_threads)

    def images_s(self, encoder: str, patches: Sequence[int], tp: int) -> float:
        """Return seconds of an encoder's group for images with these numbers of patches; with a backward if trained."""
        if not patches:
            return 0.0
        ones = np.ones(len(patches), dtype=np.int64)
        images = {encoder: (ones, np.array(patches, dtype=np.int64))}
        workload = Workload(1, 1, ones, ones * 0, ones * 0, images, freeze=self.freeze)
        return self.of(workload).sample_s(encoder, tp) * len(patches)


@dataclass(frozen=True)
class MicrobatchWork:
    """What a stage's time depends on: tokens of each sequence, and over all of them; patches of each image."""

    lengths: tuple[int, ...]
    vision_tokens: int
    target_tokens: int
    patches: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(self.lengths)

    def workload(self, freeze: tuple[str, ...]) -> Workload:
        """Return it as a workload, whose sums alone matter for images' tokens and those that carry loss."""
        lengths = np.array(self.lengths, dtype=np.int64)
        vision, targets = np.zeros_like(lengths), np.zeros_like(lengths)
        vision[0], targets[0] = self.vision_tokens, self.target_tokens
        return Workload(1, self.num_tokens, lengths, vision, targets, {}, freeze=freeze)


@dataclass(frozen=True)
class StageWork:
    """A stage of the pipeline: layers of an encoder (named) or of the backbone.

    is_first, is_last: of its module.
    """

    num_layers: int
    is_first: bool
    is_last: bool
    has_backward: bool = True
    encoder: str | None = None


@dataclass(frozen=True)
class ActionTimes:
    """Seconds of the actions of a backbone rank.

    shard_size: data parallel ranks that share one set of shards.
    """

    times: DeviceTimes
    degrees: Degrees
    shard_size: int

    def forward_s(self, stage: StageWork, work: MicrobatchWork) -> float:
        """Return seconds of a stage's forward, copies of activations to the host included."""
        total = self._total_s(stage, work)
        forward = FORWARD_SHARE * total if stage.has_backward else total
        return forward + self._copying_s(stage, work, forward)

    def backward_s(self, stage: StageWork, work: MicrobatchWork) -> float:
        """Return seconds of a stage's backward with recomputation and copies back."""
        backward = (1.0 - FORWARD_SHARE) * self._total_s(stage, work)
        return backward + self._copying_s(stage, work, backward)

    def _total_s(self, stage: StageWork, work: MicrobatchWork) -> float:
        """Seconds of forward and backward."""
        tp = self.degrees.tp
        if stage.encoder is not None:
            spec = self.times.model.encoders[stage.encoder]
            return self.times.images_s(stage.encoder, work.patches, tp) * stage.num_layers / spec.num_layers
        times = self.times.of(work.workload(self.times.freeze))
        tokens = np.array([work.num_tokens], dtype=np.float64)
        seconds = stage.num_layers * times.layer_s(tokens, tp)
        if stage.is_first:
            seconds = seconds + times.connector_s(tokens, tp)
        if stage.is_last:
            seconds = seconds + times.head_s(tokens, tp)
        return float(seconds[0]) + times.microbatch_s()

    def _copying_s(self, stage: StageWork, work: MicrobatchWork, computing: float) -> float:
        """Seconds of copies between device and host that a pass does not hide (``offload``)."""
        setup = self.times.setup
        share = setup.share_of_layers("offload")
        if not share or stage.encoder is not None:
            return 0.0
        device = self.times.device
        sliced = TrainingSetup(dtype=setup.dtype, tp=self.degrees.tp, sequence_parallel=setup.sequence_parallel)
        per_token = layer_activation_nbytes(self.times.model.backbone, sliced, _MANY_TOKENS) / _MANY_TOKENS
        host = device.links.host * self.times.efficiency.links
        return max(share * stage.num_layers * per_token * work.num_tokens / host - computing, 0.0)

    # --- communication --------------------------------------------------------------------------------------------

    def gather_s(self, stage: StageWork) -> float:
        """Return seconds of one gather of a stage's parameters."""
        nbytes = self.times.setup.dtype_nbytes * self.parameters(stage)
        return self._scattered_s(nbytes)

    def reduce_s(self, stage: StageWork) -> float:
        """Return seconds of the sum of a stage's gradients over the ranks that share a set of shards."""
        return self._scattered_s(FLOAT32_NBYTES * self.parameters(stage)) if stage.has_backward else 0.0

    def replicas_s(self, stage: StageWork) -> float:
        """Return seconds of the sum of a stage's shards over the sets of shards (hybrid sharding)."""
        replicas = self.degrees.dp // self.shard_size
        if replicas == 1 or not stage.has_backward:
            return 0.0
        nbytes = FLOAT32_NBYTES * self.parameters(stage) / self.shard_size
        return 2.0 * (replicas - 1) / replicas * nbytes / self._bandwidth(self.degrees.dp)

    def transfer_s(self, work: MicrobatchWork) -> float:
        """Return seconds in which hidden states of a microbatch, or their gradients, reach the next rank."""
        sliced = self.degrees.tp if self.times.setup.sequence_parallel else 1
        width = self.times.model.backbone.hidden_size
        nbytes = self.times.setup.dtype_nbytes * width * work.num_tokens / sliced
        return nbytes / self._link(self.degrees.replica_size)

    def rows_s(self, encoder: str, work: MicrobatchWork) -> float:
        """Return seconds in which hidden states of an encoder, or feature rows, reach the next rank."""
        width = self.times.model.encoders[encoder].hidden_size
        nbytes = self.times.setup.dtype_nbytes * width * sum(work.patches)
        return nbytes / self._link(self.degrees.replica_size)

    def optimizer_s(self, stages: Sequence[StageWork]) -> float:
        """Return seconds of the update on a rank with these stages."""
        parameters = sum(self.parameters(stage) for stage in stages if stage.has_backward)
        return float(self._of_steps.step_s(np.array([parameters / self.shard_size]))[0])

    def parameters(self, stage: StageWork) -> float:
        """Return a stage's parameters on a device before data parallel sharding."""
        model, tp = self.times.model, self.degrees.tp
        if stage.encoder is not None:
            return stage.num_layers * model.encoders[stage.encoder].layer_parameters / tp
        backbone = model.backbone
        if stage.is_first and stage.is_last:
            return (backbone.num_parameters + model.connector.num_parameters) / tp
        total = stage.num_layers * backbone.layer_parameters
        if stage.is_first:
            total += backbone.head_parameters + model.connector.num_parameters
        if stage.is_last:
            total += backbone.head_parameters
        return total / tp

    @cached_property
    def _of_steps(self) -> ModuleTimes:
        return self.times.of(MicrobatchWork((1,), 0, 0).workload(self.times.freeze))

    def _scattered_s(self, nbytes: float) -> float:
        return (self.shard_size - 1) / self.shard_size * nbytes / self._bandwidth(self.shard_size)

    def _bandwidth(self, ranks: int) -> float:
        """Bytes/s of a device in a collective of so many neighbouring data parallel ranks.

        Data enter a node once, over the network links of all its members.
        """
        device, replica = self.times.device, self.degrees.replica_size
        if ranks * replica <= device.devices_per_node:
            return device.links.node * self.times.efficiency.links
        members = max(1, device.devices_per_node // replica)
        return min(device.links.node, members * device.links.network) * self.times.efficiency.links

    def _link(self, devices: int) -> float:
        device = self.times.device
        inside = devices <= device.devices_per_node
        return (device.links.node if inside else device.links.network) * self.times.efficiency.links
