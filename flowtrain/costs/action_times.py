"""Seconds of each action of a rank: computing a stage, gathering and reducing over replicas, sending, updating.

A microbatch's work is a ``Workload`` of its own, so a stage's time comes from the same ``ModuleTimes`` as a plan's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from flowtrain.costs.activations import layer_activation_nbytes
from flowtrain.costs.cluster import DeviceType
from flowtrain.costs.collectives import BACKWARD_SHARE, group_link
from flowtrain.costs.communication import TensorCommunication
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.costs.module_times import ModuleTimes
from flowtrain.costs.profile import Profile
from flowtrain.costs.profile_together import ASSUMED_INTERFERENCE
from flowtrain.costs.profiled_times import CPU, ProfileTimes
from flowtrain.costs.roofline import Efficiency, Roofline
from flowtrain.costs.training_setup import FLOAT32_NBYTES, TrainingSetup
from flowtrain.costs.workload import Workload
from flowtrain.types.plan import Degrees

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
    efficiency: Efficiency = field(default_factory=Efficiency)

    def of(self, workload: Workload) -> ModuleTimes:
        """Return the times for a workload."""
        if self.profile is None:
            return Roofline(self.device, self.model, workload, self.setup, self.efficiency)
        communication = TensorCommunication(self.device, self.model, workload, self.setup, self.link_efficiency)
        return ProfileTimes(self.profile, workload, communication, self.max_batch_patches, self.decode_threads)

    @property
    def link_efficiency(self) -> float:
        """Share of the links' bandwidth that is reached: all of those that a profile measured."""
        return self.efficiency.links if self.profile is None else 1.0

    def slowdown(self, encoder: str) -> float:
        """Return the time of an encoder and the backbone at once on a device over the sum of both alone."""
        return self.of(MicrobatchWork((1,), 0, 0).workload(self.freeze)).slowdown(encoder) or ASSUMED_INTERFERENCE

    def images_s(self, encoder: str, patches: Sequence[int], tp: int, *, in_ranks: bool = False) -> float:
        """Return seconds of an encoder's group for images with these numbers of patches; with a backward if trained.

        in_ranks: as in ``ModuleTimes``.
        """
        if not patches:
            return 0.0
        ones = np.ones(len(patches), dtype=np.int64)
        images = {encoder: (ones, np.array(patches, dtype=np.int64))}
        workload = Workload(1, 1, ones, ones * 0, ones * 0, images, freeze=self.freeze)
        return float(self.of(workload).images_s(encoder, tp, in_ranks=in_ranks).sum())


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
class StageParameters:
    """Parameters of a stage on a device."""

    layers: float
    outer: float
    """Embedding, connector and head, which are gathered and reduced as one."""
    unit: float
    """Those of a layer, which are gathered and reduced as one."""
    trained_share: float = 1.0
    """Of all that are trained, and so reduced and updated."""

    @property
    def total(self) -> float:
        """All of them."""
        return self.layers + self.outer


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
        forward = (1.0 - BACKWARD_SHARE) * total if stage.has_backward else total
        return forward + self._copying_s(stage, work, forward)

    def backward_s(self, stage: StageWork, work: MicrobatchWork) -> float:
        """Return seconds of a stage's backward with recomputation and copies back."""
        backward = BACKWARD_SHARE * self._total_s(stage, work)
        return backward + self._copying_s(stage, work, backward)

    def _total_s(self, stage: StageWork, work: MicrobatchWork) -> float:
        """Seconds of forward and backward."""
        tp = self.degrees.tp
        if stage.encoder is not None:
            spec = self.times.model.encoders[stage.encoder]
            images = self.times.images_s(stage.encoder, work.patches, tp, in_ranks=True)
            return images * stage.num_layers / spec.num_layers
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
        host = device.links.host * self.times.link_efficiency
        return max(share * stage.num_layers * per_token * work.num_tokens / host - computing, 0.0)

    # --- communication --------------------------------------------------------------------------------------------

    def gather_s(self, stage: StageWork, computing: float, *, of_backward: bool = False) -> float:
        """Return seconds of a pass's gather of parameters that its computation does not hide.

        FSDP gathers a layer while the one before computes, so nothing hides a forward's first. What is outside of the
        layers is there until the backward. With ``sharding: gradients`` a step's first forward alone gathers.
        """
        held = self.parameters(stage)
        if of_backward:
            return self._exposed(self._gathering_s(held.layers), computing, 0.0)
        every = self._gathering_s(held.total)
        first = self._gathering_s(held.unit + held.outer)
        return (
            min(self._exposed(every, computing, first), every)
            if self._gathers_once
            else self._exposed(every, computing, first)
        )

    def reduce_s(self, stage: StageWork, computing: float, *, is_last: bool) -> float:
        """Return seconds of the sum of a stage's gradients that its backward does not hide.

        Sets of shards sum with the last microbatch of a step, all in the time that gathers leave of the backward.
        """
        if not stage.has_backward:
            return 0.0
        held, replica = self.parameters(stage), self.degrees.replica_size
        share = FLOAT32_NBYTES * (self.shard_size - 1) / self.shard_size / self._link(self.shard_size, replica)
        reduced = held.trained_share * held.total
        summing, groups = share * reduced, self.degrees.dp // self.shard_size
        if is_last and groups > 1:
            shard_nbytes = FLOAT32_NBYTES * reduced / self.shard_size
            summing += 2.0 * (groups - 1) / groups * shard_nbytes / self._link(groups, self.shard_size * replica)
        gathering = 0.0 if self._gathers_once else self._gathering_s(held.layers)
        return self._exposed(summing, max(computing - gathering, 0.0), share * min(held.unit + held.outer, reduced))

    def transfer_s(self, work: MicrobatchWork) -> float:
        """Return seconds in which hidden states of a microbatch, or their gradients, reach the next rank."""
        sliced = self.degrees.tp if self.times.setup.sequence_parallel else 1
        width = self.times.model.backbone.hidden_size
        nbytes = self.times.setup.dtype_nbytes * width * work.num_tokens / sliced
        return nbytes / self._sending()

    def rows_s(self, encoder: str, work: MicrobatchWork) -> float:
        """Return seconds in which hidden states of an encoder, or feature rows, reach the next rank."""
        spec = self.times.model.encoders[encoder]
        width = spec.hidden_size * spec.levels
        nbytes = self.times.setup.dtype_nbytes * width * sum(work.patches)
        return nbytes / self._sending()

    def optimizer_s(self, stages: Sequence[StageWork]) -> float:
        """Return seconds of the update on a rank with these stages."""
        held = [self.parameters(stage) for stage in stages if stage.has_backward]
        parameters = sum(each.trained_share * each.total for each in held)
        return float(self._of_steps.step_s(np.array([parameters / self.shard_size]))[0])

    def parameters(self, stage: StageWork) -> StageParameters:
        """Return a stage's parameters on a device before data parallel sharding."""
        model, tp = self.times.model, self.degrees.tp
        if stage.encoder is not None:
            layer = model.encoders[stage.encoder].layer_parameters / tp
            return StageParameters(stage.num_layers * layer, 0.0, layer)
        backbone, layer = model.backbone, model.backbone.layer_parameters / tp
        if stage.is_first and stage.is_last:
            outer = float(backbone.num_parameters - backbone.num_layers * backbone.layer_parameters)
        else:
            outer = float(backbone.head_parameters * (stage.is_first + stage.is_last))
        outer += model.connector.num_parameters * stage.is_first
        return StageParameters(stage.num_layers * layer, outer / tp, layer, model.trained_share)

    @property
    def gathers(self) -> bool:
        """Whether parameters are in shards."""
        return self.shard_size > 1

    @property
    def _gathers_once(self) -> bool:
        return self.times.setup.sharding == "gradients"

    @cached_property
    def _of_steps(self) -> ModuleTimes:
        return self.times.of(MicrobatchWork((1,), 0, 0).workload(self.times.freeze))

    def _exposed(self, seconds: float, computing: float, unhidden: float) -> float:
        """What a computation does not hide of a collective; on a CPU nothing overlaps."""
        return seconds if self.times.device.name == CPU else max(seconds - computing, 0.0) + unhidden

    def _gathering_s(self, parameters: float) -> float:
        share = (self.shard_size - 1) / self.shard_size
        link = self._link(self.shard_size, self.degrees.replica_size)
        return self.times.setup.dtype_nbytes * share * parameters / link

    def _link(self, members: int, apart: int) -> float:
        """Bytes/s of each of so many ranks in a collective."""
        link = group_link(self.times.device, np.array(members), np.array(apart))
        return float(link) * self.times.link_efficiency

    def _sending(self) -> float:
        """Bytes/s from a rank to the next of its pipeline; each has its own link."""
        device = self.times.device
        inside = self.degrees.replica_size <= device.devices_per_node
        return (device.links.node if inside else device.links.network) * self.times.link_efficiency
