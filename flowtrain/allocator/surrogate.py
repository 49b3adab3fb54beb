"""Predicted throughput of a configuration: the surrogate of T(c) of FlowTrain 3.3.

Times of a layer, the head and a sample's images come from ``ModuleTimes``. This file adds the effects of parallelism:
microbatches of a step, pipeline fill, transfers between stages, FSDP's gathers and reductions, the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flowtrain.allocator.candidates import Candidate, CandidateColumns
from flowtrain.allocator.shards import num_shards
from flowtrain.allocator.slices import ONE_EACH, Slices, layers_of_ranks
from flowtrain.costs.activations import layer_activation_nbytes
from flowtrain.costs.cluster import Cluster, DeviceType
from flowtrain.costs.flops import FloatArray, IntArray
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.costs.module_times import ModuleTimes
from flowtrain.costs.training_setup import FLOAT32_NBYTES, TrainingSetup
from flowtrain.costs.workload import Workload

BACKBONE = "backbone"
_MANY_TOKENS = 1 << 16
"""Bytes per token are taken from so many, since slices are whole tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class StepTime:
    """Seconds of one optimizer step of the backbone, each ``[N]``; they add up to ``total``."""

    computing: FloatArray
    """The slowest stage over all its microbatches, with tensor parallel communication."""
    transfers: FloatArray
    """Transfers between stages."""
    gathering: FloatArray
    """Gathers of parameters, without the part that overlaps with computing."""
    fill: FloatArray
    """Idle time while the pipeline fills and drains (``fill_slots``)."""
    offloading: FloatArray
    """Copies of activations to the host and back, without the part that overlaps with computing."""
    reducing: FloatArray
    """Reduction of gradients, without the part that overlaps with the backward before it."""
    optimizer: FloatArray
    """Clipping and update."""
    num_microbatches: IntArray
    """Microbatches of a DP replica (a count, not seconds)."""

    @property
    def total(self) -> FloatArray:
        """Seconds of the step."""
        slots = self.computing + self.transfers + self.gathering + self.offloading + self.fill
        return slots + self.reducing + self.optimizer


class Surrogate:
    """Predicts the samples/s of configurations; for an encoder, only samples that have images for it count."""

    def __init__(
        self,
        cluster: Cluster,
        model: ModelSpec,
        workload: Workload,
        setup: TrainingSetup,
        times: Mapping[str, ModuleTimes],
        link_efficiency: float = 0.8,
        slices: Slices = ONE_EACH,
    ) -> None:
        """times: by type of device.

        setup: its dp and tp are ignored.
        link_efficiency: share of the links' bandwidth that is reached.
        slices: how pipeline ranks share the layers; interleaved 1F1B with several chunks.
        """
        self._cluster, self._model, self._workload, self._setup = cluster, model, workload, setup
        self._times, self._link_efficiency = times, link_efficiency
        self._chunks = slices.chunks
        # By pipeline degree: layers of the first, the last and the longest rank, and the most that one offloads.
        depth = model.backbone.num_layers
        ranks = [layers_of_ranks(slices, depth, pp) for pp in range(1, depth // slices.chunks + 1)]
        rows = ((len(each[0]), len(each[-1]), max(map(len, each)), self._most_offloaded(each)) for each in ranks)
        self._stages = np.array([(0, 0, 0, 0), *rows], dtype=np.int64)

    def _most_offloaded(self, ranks: Sequence[Sequence[int]]) -> int:
        words = self._setup.activation_checkpointing
        if isinstance(words, str):
            return max(map(len, ranks)) if words == "offload" else 0
        return max(sum(words[layer] == "offload" for layer in layers) for layers in ranks)

    def rate(self, candidate: Candidate) -> float:
        """Return samples/s of one configuration."""
        return float(self.rates(_columns(candidate))[0])

    def rates(self, columns: CandidateColumns) -> FloatArray:
        """Return samples/s of many configurations, ``[C]``."""
        if columns.module == BACKBONE:
            return self._workload.global_batch_size / self.step_times(columns).total
        times = self._times[columns.device_type]
        rates = np.empty(len(columns))
        for tp in np.unique(columns.tp).tolist():
            at = columns.tp == tp
            rates[at] = columns.dp[at] / times.sample_s(columns.module, tp)
        return rates

    def step_time(self, candidate: Candidate) -> StepTime:
        """Return the times of a step of one backbone configuration, as arrays of length one."""
        return self.step_times(_columns(candidate))

    def step_times(self, columns: CandidateColumns) -> StepTime:
        """Return the times of a step of each backbone configuration."""
        device = self._cluster[columns.device_type]
        dp, pp, tp = columns.dp, columns.pp, columns.tp
        num_microbatches = self._workload.num_microbatches(dp).astype(np.float64)
        tokens = self._workload.fullest_tokens(dp) / num_microbatches
        stage = self._stage_s(columns, tokens)
        sent = np.where(pp > 1, 2.0 * self._setup.dtype_nbytes * self._model.backbone.hidden_size * tokens, 0.0)
        if self._setup.sequence_parallel:
            sent = sent / tp
        transfer = self._chunks * sent / self._link(device, pp * tp)
        parameters, shards = self._stage_parameters(columns), self._shards(columns)
        shared, link = (shards - 1) / shards * parameters, self._link(device, shards * pp * tp)
        gathers = 1 if self._setup.sharding == "gradients" else 2
        gather = gathers * self._setup.dtype_nbytes * shared / link
        gathering = np.maximum(gather - stage - transfer, 0.0)
        offloading = self._offloading_s(columns, stage, tokens)
        slot = stage + transfer + gathering + offloading
        return StepTime(
            computing=num_microbatches * stage,
            transfers=num_microbatches * transfer,
            gathering=num_microbatches * gathering,
            offloading=num_microbatches * offloading,
            fill=fill_slots(pp, num_microbatches, self._chunks) * slot,
            reducing=self._reducing_s(columns, stage, num_microbatches, gather * (gathers - 1) / gathers),
            optimizer=self._times[columns.device_type].step_s(parameters / shards),
            num_microbatches=num_microbatches.astype(np.int64),
        )

    def _reducing_s(
        self, columns: CandidateColumns, stage: FloatArray, num_microbatches: FloatArray, gather: FloatArray
    ) -> FloatArray:
        """Seconds of reductions that no backward hides. gather: seconds of the gathers in a backward.

        Replicas under hybrid sharding sum their shards with the last microbatch only.
        """
        device, parameters, shards = (
            self._cluster[columns.device_type],
            self._stage_parameters(columns),
            self._shards(columns),
        )
        inside = self._link(device, shards * columns.pp * columns.tp)
        reduce = FLOAT32_NBYTES * (shards - 1) / shards * parameters / inside
        replicas = columns.dp / shards
        shard_nbytes = FLOAT32_NBYTES * parameters / shards
        last = reduce + 2.0 * (replicas - 1) / replicas * shard_nbytes / self._link(device, columns.devices)
        backward = 2.0 / 3.0 * stage
        once = np.maximum(last - backward, 0.0)
        if columns.reduces_each is None:
            return once
        # Here every backward also gathers over the same link.
        free = np.maximum(backward - gather, 0.0)
        each = (num_microbatches - 1) * np.maximum(reduce - free, 0.0) + np.maximum(last - free, 0.0)
        return np.where(columns.reduces_each, each, once)

    def _offloading_s(self, columns: CandidateColumns, stage: FloatArray, tokens: FloatArray) -> FloatArray:
        """Seconds of a microbatch's copies that its forward and its backward do not hide."""
        if not self._stages[:, 3].any():
            return np.zeros(len(columns))
        host = self._cluster[columns.device_type].links.host * self._link_efficiency
        offloaded, copying = self._stages[columns.pp].T[3], np.empty(len(columns))
        for tp in np.unique(columns.tp).tolist():
            at, setup = columns.tp == tp, replace(self._setup, tp=tp)
            per_token = layer_activation_nbytes(self._model.backbone, setup, _MANY_TOKENS) / _MANY_TOKENS
            copying[at] = offloaded[at] * per_token * tokens[at] / host
        return np.maximum(copying - stage / 3.0, 0.0) + np.maximum(copying - 2.0 / 3.0 * stage, 0.0)

    def _shards(self, columns: CandidateColumns) -> IntArray:
        """Data parallel ranks that hold one set of shards; 1 where the configuration has none."""
        per_node = self._cluster[columns.device_type].devices_per_node
        return np.maximum(num_shards(self._setup, columns.dp, columns.pp * columns.tp, per_node), 1)

    def mfu(self, candidate: Candidate) -> float:
        """Return the share of the devices' peak that a module reaches while it does not wait, by model FLOPs."""
        if candidate.module == BACKBONE:
            flops = self._workload.flops(self._model)
            per_sample = float((flops.backbone + flops.connector).mean())
        else:
            per_sample = self._workload.encoder_flops(self._model, candidate.module)
        peak = candidate.devices * self._cluster[candidate.device_type].flops
        return per_sample * candidate.rate / peak

    def _stage_s(self, columns: CandidateColumns, tokens: FloatArray) -> FloatArray:
        """Seconds of forward and backward of one microbatch on the slowest pipeline rank."""
        times, (first, last, longest, _) = self._times[columns.device_type], self._stages[columns.pp].T
        slowest = np.empty(len(columns))
        for tp in np.unique(columns.tp).tolist():
            at = columns.tp == tp
            layer = times.layer_s(tokens[at], tp)
            connector, head = times.connector_s(tokens[at], tp), times.head_s(tokens[at], tp)
            ends = np.maximum(first[at] * layer + connector, last[at] * layer + head)
            alone = longest[at] * layer + connector + head
            slowest[at] = np.where(columns.pp[at] == 1, alone, np.maximum(longest[at] * layer, ends))
        return slowest + self._chunks * times.microbatch_s()

    def _stage_parameters(self, columns: CandidateColumns) -> FloatArray:
        """Parameters that each device of the fullest stage holds before data parallel sharding."""
        backbone, (first, last, longest, _) = self._model.backbone, self._stages[columns.pp].T
        table, layer = backbone.head_parameters, backbone.layer_parameters
        ends = np.maximum(first * layer + table + self._model.connector.num_parameters, last * layer + table)
        alone = backbone.num_parameters + self._model.connector.num_parameters
        return np.where(columns.pp == 1, alone, np.maximum(longest * layer, ends)) / columns.tp

    def _link(self, device: DeviceType, group: IntArray) -> FloatArray:
        """Bytes/s inside a group of neighbouring devices: of the node's links if the group fits into a node."""
        inside = group <= device.devices_per_node
        return np.where(inside, device.links.node, device.links.network) * self._link_efficiency


def fill_slots(pp: IntArray, num_microbatches: FloatArray, chunks_per_rank: int) -> FloatArray:
    """Return the number of slots that a pipeline rank idles in a step; arrays are ``[N]``.

    A slot is the time of one microbatch on one rank. 1F1B idles pp - 1 slots. With several chunks per rank, it idles
    one chunk's share of that (Narayanan et al. 2021, section 2.2). With fewer microbatches than ranks, each further
    chunk also waits for its first microbatch.
    """
    short = np.maximum(pp - num_microbatches, 0.0)
    return ((pp - 1) + (chunks_per_rank - 1) * short) / chunks_per_rank


def _columns(candidate: Candidate) -> CandidateColumns:
    degrees = candidate.degrees
    dp, pp, tp = (np.array([degree], dtype=np.int64) for degree in (degrees.dp, degrees.pp, degrees.tp))
    reduces_each = np.array([candidate.gradient_reduction == "microbatch"])
    return CandidateColumns(candidate.module, candidate.device_type, dp, pp, tp, reduces_each)


def starved_share(production: float, consumption: float) -> float:
    """Return the share of its time that the consumer waits; both rates are in samples/s of the whole data."""
    return max(0.0, 1.0 - production / consumption)


def blocked_share(production: float, consumption: float) -> float:
    """Return the share of their time that producers wait for the consumer."""
    return max(0.0, 1.0 - consumption / production) if math.isfinite(production) else 1.0
