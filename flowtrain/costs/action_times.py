"""Seconds of each action of a rank: computing a stage, gathering and reducing over replicas, sending, updating.

A microbatch's work is a ``Workload`` of its own, so a stage's time comes from the same ``ModuleTimes`` as a plan's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from flowtrain.costs.activations import layer_activation_nbytes
from flowtrain.costs.cluster import DeviceType
from flowtrain.costs.collectives import BACKWARD_SHARE, group_link
from flowtrain.costs.communication import TensorCommunication
from flowtrain.costs.flops import FloatArray, IntArray
from flowtrain.costs.microbatches import MicrobatchColumns, MicrobatchWork
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.costs.module_times import ModuleTimes
from flowtrain.costs.operators import OperatorRules
from flowtrain.costs.profile import Profile
from flowtrain.costs.profile_together import ASSUMED_INTERFERENCE
from flowtrain.costs.profiled_times import CPU, ProfileTimes
from flowtrain.costs.rank_memory import trains_embedding
from flowtrain.costs.roofline import Roofline
from flowtrain.costs.training_setup import FLOAT32_NBYTES, TrainingSetup
from flowtrain.costs.workload import Workload
from flowtrain.types.plan import Degrees

SecondsT = TypeVar("SecondsT", float, FloatArray)

MOST_LESS = 0.5
"""Share of a backward that a step's first one may take less, however short it is."""
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
    rules: OperatorRules = field(default_factory=OperatorRules)

    def of(self, workload: Workload) -> ModuleTimes:
        """Return the times for a workload."""
        times = self._uncalibrated(workload)
        calibration = self.profile.calibration if self.profile is not None else None
        return calibration.times(times) if calibration is not None else times

    def _uncalibrated(self, workload: Workload) -> ModuleTimes:
        if self.profile is None or not self.profile.is_measured:
            return Roofline(self.device, self.model, workload, self.setup, self.rules)
        communication = TensorCommunication(self.device, self.model, workload, self.setup, self.link_efficiency)
        return ProfileTimes(self.profile, workload, communication, self.max_batch_patches, self.decode_threads)

    @property
    def _is_measured(self) -> bool:
        return self.profile is not None and self.profile.is_measured

    @property
    def link_efficiency(self) -> float:
        """Share of the links' bandwidth that collectives reach: all of those that a profile measured."""
        return 1.0 if self._is_measured else self.rules.link_share("collective")

    @property
    def sending_efficiency(self) -> float:
        """As ``link_efficiency``, of transfers from one device to another."""
        return 1.0 if self._is_measured else self.rules.link_share("point_to_point")

    def slowdown(self, encoder: str) -> float:
        """Return the time of an encoder and the backbone at once on a device over the sum of both alone."""
        return self.of_any_data.slowdown(encoder) or ASSUMED_INTERFERENCE

    def images_s(self, encoder: str, patches: Sequence[int], tp: int) -> float:
        """Return seconds of an encoder actor's group for images with these numbers of patches."""
        return float(self.each_image_s(encoder, np.array(patches, dtype=np.int64), tp).sum())

    def each_image_s(
        self, encoder: str, patches: IntArray, tp: int, *, together: FloatArray | float | None = None
    ) -> FloatArray:
        """Return seconds of an encoder's group for each image, ``[I]``; with a backward if trained.

        patches: of each image. together: as in ``ModuleTimes``, ``[I]``.
        """
        if not len(patches):
            return np.zeros(0)
        return self._of_images(encoder, patches).images_s(encoder, tp, together=together)

    def each_forward_s(self, encoder: str, patches: IntArray, tp: int) -> FloatArray:
        """As ``each_image_s``, of the device alone: an accelerator's host decodes images at the same time."""
        return self._of_images(encoder, patches).encode_stages_s(encoder, tp)[1] if len(patches) else np.zeros(0)

    def _of_images(self, encoder: str, patches: IntArray) -> ModuleTimes:
        ones = np.ones(len(patches), dtype=np.int64)
        return self.of(Workload(1, 1, ones, ones * 0, ones * 0, {encoder: (ones, patches)}, freeze=self.freeze))

    @cached_property
    def of_any_data(self) -> ModuleTimes:
        """Times that need no workload: callers pass the data, or the time is the same for all data."""
        one = np.ones(1, dtype=np.int64)
        return self.of(Workload(1, 1, one, one * 0, one * 0, {}, freeze=self.freeze))


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
    recomputed: int | None = None
    """Layers that run their forward again in the backward; None: the share of layers that the setup tells."""


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


@dataclass(frozen=True, slots=True, eq=False)
class _StageSeconds:
    """Seconds of a stage's microbatches, forward and backward, ``[M]``."""

    layers: FloatArray
    """With the connector."""
    head_forward: FloatArray
    total: FloatArray
    """With the head, the embedding's gradient and what any stage takes."""


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
        return float(self.passes_s(stage, MicrobatchColumns.of([work]))[0][0])

    def backward_s(self, stage: StageWork, work: MicrobatchWork) -> float:
        """Return seconds of a stage's backward with recomputation and copies back."""
        return float(self.passes_s(stage, MicrobatchColumns.of([work]))[1][0])

    def passes_s(self, stage: StageWork, works: MicrobatchColumns) -> tuple[FloatArray, FloatArray]:
        """Return ``forward_s`` and ``backward_s`` of each microbatch, ``[M]``."""
        if stage.recomputed is not None:
            return self._recomputing_s(stage, works)
        each = self._stage_s(stage, works)
        share = 1.0 - BACKWARD_SHARE if stage.encoder is not None else self.times.of_any_data.forward_share
        forward = share * each.layers + each.head_forward + self._pass_forward_s(stage)
        backward = each.total - forward
        if not stage.has_backward:
            forward = each.total
        copying = (self._copying_s(stage, works, each) for each in (forward, backward))
        return forward + next(copying), backward + next(copying)

    def _recomputing_s(self, stage: StageWork, works: MicrobatchColumns) -> tuple[FloatArray, FloatArray]:
        """``passes_s`` of a stage that recomputes a number of its own layers and keeps the others."""
        forward, backward = self._keeping.passes_s(replace(stage, recomputed=None), works)
        if not stage.recomputed or not stage.has_backward:
            return forward, backward
        again = replace(stage, num_layers=stage.recomputed, is_first=False, is_last=False, recomputed=None)
        return forward, backward + self._keeping.passes_s(again, works)[0] - self._pass_forward_s(again)

    @cached_property
    def _keeping(self) -> ActionTimes:
        """The same without recomputation."""
        setup = replace(self.times.setup, activation_checkpointing="none", encoder_checkpointing=None)
        return replace(self, times=replace(self.times, setup=setup))

    def _stage_s(self, stage: StageWork, works: MicrobatchColumns) -> _StageSeconds:
        tp, none = self.degrees.tp, np.zeros(len(works))
        if stage.encoder is not None:
            spec = self.times.model.encoders[stage.encoder]
            together = np.repeat(works.num_images, works.num_images).astype(np.float64)
            images = self.times.each_image_s(stage.encoder, works.patches, tp, together=together)
            layers = works.of_images(images) * stage.num_layers / spec.num_layers
            return _StageSeconds(layers, none, layers)
        times = self.times.of_any_data
        seconds = times.microbatches_s(works, tp)
        layers = stage.num_layers * seconds.layer
        if stage.is_first:
            layers = layers + seconds.connector
        total = layers + times.pass_s
        total = total + seconds.embedding if stage.is_first else total
        total = total + seconds.head if stage.is_last else total
        return _StageSeconds(layers, seconds.head_forward if stage.is_last else none, total)

    def _pass_forward_s(self, stage: StageWork) -> float:
        """Seconds of a stage's forward, whatever it computes; an encoder's images have them."""
        times = self.times.of_any_data
        return 0.0 if stage.encoder is not None else times.pass_forward_share * times.pass_s

    @cached_property
    def microbatch_s(self) -> float:
        """Seconds that a rank takes once for each microbatch, when it fetches it, whatever its stages are."""
        return float(self.times.of_any_data.microbatch_s(np.array([self.degrees.replica_size]))[0])

    @property
    def launch_s(self) -> float:
        """Seconds that a rank takes to start a transfer and to wait for it, whatever its size."""
        return self.times.of_any_data.launch_s

    def _copying_s(self, stage: StageWork, works: MicrobatchColumns, computing: FloatArray) -> FloatArray:
        """Seconds of copies between device and host that a pass does not hide (``offload``), ``[M]``."""
        setup = self.times.setup
        share = setup.share_of_layers("offload")
        if not share or stage.encoder is not None:
            return np.zeros_like(computing)
        device = self.times.device
        sliced = TrainingSetup(dtype=setup.dtype, tp=self.degrees.tp, sequence_parallel=setup.sequence_parallel)
        per_token = layer_activation_nbytes(self.times.model.backbone, sliced, _MANY_TOKENS) / _MANY_TOKENS
        host = device.links.host * self.times.sending_efficiency
        return np.maximum(share * stage.num_layers * per_token * works.num_tokens / host - computing, 0.0)

    # --- communication --------------------------------------------------------------------------------------------

    def gather_s(self, stage: StageWork, computing: SecondsT, *, of_backward: bool = False) -> SecondsT:
        """Return seconds of a pass's gather of parameters that its computation does not hide.

        computing: of one pass, or of many.

        FSDP gathers a layer while the one before computes, so nothing hides a forward's first. What is outside of the
        layers is there until the backward. With ``sharding: gradients`` a step's first forward alone gathers.
        """
        held = self.sharded_parameters(stage)
        if of_backward:
            return self._exposed(self._gathering_s(held.layers), computing, 0.0)
        every = self._gathering_s(held.total)
        first = self._gathering_s(held.unit + held.outer)
        exposed = self._exposed(every, computing, first)
        return np.minimum(exposed, self.times.of_any_data.collectives * every) if self._gathers_once else exposed

    def reduce_s(self, stage: StageWork, computing: SecondsT, *, is_last: bool) -> SecondsT:
        """Return seconds of the sum of a stage's gradients that its backward does not hide.

        Sets of shards sum with the last microbatch of a step, all in the time that gathers leave of the backward.
        """
        if not stage.has_backward:
            return 0.0 * computing
        held, replica = self.parameters(stage), self.degrees.replica_size
        share = FLOAT32_NBYTES * (self.shard_size - 1) / self.shard_size / self._link(self.shard_size, replica)
        reduced = held.trained_share * held.total
        summing, groups = share * reduced, self.degrees.dp // self.shard_size
        if is_last and groups > 1:
            shard_nbytes = FLOAT32_NBYTES * reduced / self.shard_size
            summing += 2.0 * (groups - 1) / groups * shard_nbytes / self._link(groups, self.shard_size * replica)
        gathering = 0.0 if self._gathers_once else self._gathering_s(held.layers)
        return self._exposed(
            summing, np.maximum(computing - gathering, 0.0), share * min(held.unit + held.outer, reduced)
        )

    def transfer_s(self, work: MicrobatchWork) -> float:
        """Return seconds in which hidden states of a microbatch, or their gradients, reach the next rank."""
        return self.token_transfer_s * work.num_tokens

    @cached_property
    def token_transfer_s(self) -> float:
        """Seconds of ``transfer_s`` for each token."""
        sliced = self.degrees.tp if self.times.setup.sequence_parallel else 1
        width = self.times.model.backbone.hidden_size
        return self.times.setup.dtype_nbytes * width / sliced / self._sending()

    def rows_s(self, encoder: str, work: MicrobatchWork) -> float:
        """Return seconds in which hidden states of an encoder, or feature rows, reach the next rank."""
        return self.patch_transfer_s(encoder) * sum(work.patches)

    def patch_transfer_s(self, encoder: str) -> float:
        """Return seconds of ``rows_s`` for each patch."""
        spec = self.times.model.encoders[encoder]
        width = spec.hidden_size * spec.levels
        return self.times.setup.dtype_nbytes * width / self._sending()

    def ends_s(self, stage: StageWork) -> tuple[float, float]:
        """Return seconds that a step's first forward and last backward of a stage take more than its others.

        Of several replicas they are in the collectives.
        """
        times, held = self.times.of_any_data, self.sharded_parameters(stage)
        trained = held.trained_share * held.total
        found = times.ends_s(np.array([trained])) if self.degrees.dp == 1 and held.total else None
        if found is None:
            return 0.0, 0.0
        forward = times.ends_forward_share * float(found[0])
        return forward, float(found[0]) - forward if stage.has_backward else 0.0

    def first_backward_s(self, stage: StageWork, backward: SecondsT) -> SecondsT:
        """Return seconds that a step's first backward of a stage takes less than others; backward: of one of these.

        Where each backward is reduced, gradients are added to as shards.
        """
        if not stage.has_backward:
            return 0.0 * backward
        held = self.parameters(stage)
        shards = self.shard_size if self.times.setup.gradient_reduction == "microbatch" else 1
        less = self.times.of_any_data.first_backward_s(np.array([held.trained_share * held.total / shards]))
        found: SecondsT = np.minimum(less[0], MOST_LESS * backward)
        return found

    def optimizer_s(self, stages: Sequence[StageWork]) -> float:
        """Return seconds of the update on a rank with these stages, and of what comes before it."""
        held = [self.parameters(stage) for stage in stages if stage.has_backward]
        parameters = sum(each.trained_share * each.total for each in held)
        update = float(self.times.of_any_data.step_s(np.array([parameters / self.shard_size]))[0])
        return update + self.tied_s(stages)

    def tied_s(self, stages: Sequence[StageWork]) -> float:
        """Return seconds in which a rank with these stages exchanges the gradients of a tied table with the other end.

        0 on other ranks.
        """
        backbone, own = self.times.model.backbone, [stage for stage in stages if stage.encoder is None]
        has_one = any(stage.is_first for stage in own) != any(stage.is_last for stage in own)
        if not (backbone.tied_embeddings and has_one and trains_embedding(backbone)) or "backbone" in self.times.freeze:
            return 0.0
        nbytes = FLOAT32_NBYTES * backbone.head_parameters / self.degrees.tp / self.shard_size
        return nbytes / self._sending()

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

    def sharded_parameters(self, stage: StageWork) -> StageParameters:
        """Return those that replicas share, gather and reduce: all but a frozen encoder's, which each has whole."""
        return self.parameters(stage) if _is_sharded(stage) else StageParameters(0.0, 0.0, 0.0)

    def gathers_parameters(self, stage: StageWork) -> bool:
        """Whether ranks gather a stage's parameters from shards."""
        return self.gathers and _is_sharded(stage)

    @property
    def gathers(self) -> bool:
        """Whether parameters are in shards."""
        return self.shard_size > 1

    @property
    def _gathers_once(self) -> bool:
        return self.times.setup.sharding == "gradients"

    def _exposed(self, seconds: float, computing: SecondsT, unhidden: float) -> SecondsT:
        """What a computation does not hide of a collective; on a CPU nothing overlaps."""
        is_hidden = self.times.device.name != CPU
        exposed = np.maximum(seconds - computing, 0.0) + unhidden if is_hidden else 0.0 * computing + seconds
        return self.times.of_any_data.collectives * exposed

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
        return (device.links.node if inside else device.links.network) * self.times.sending_efficiency


def _is_sharded(stage: StageWork) -> bool:
    return stage.encoder is None or stage.has_backward
