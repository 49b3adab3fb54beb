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
from flowtrain.allocator.parameter_traffic import BACKWARD_SHARE, ParameterTraffic, StageParameters
from flowtrain.allocator.slices import ONE_EACH, Slices, layers_of_ranks
from flowtrain.costs.action_times import MOST_LESS
from flowtrain.costs.activations import layer_activation_nbytes
from flowtrain.costs.cluster import Cluster
from flowtrain.costs.flops import FloatArray, IntArray
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.costs.module_times import ModuleTimes
from flowtrain.costs.profiled_times import CPU
from flowtrain.costs.rank_memory import trains_embedding
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
    """Idle time while the pipeline fills and drains (``fill_s``)."""
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


@dataclass(frozen=True, slots=True, eq=False)
class SlotTime:
    """Seconds of one microbatch on the slowest pipeline rank, each ``[N]``; the names are those of ``StepTime``."""

    computing: FloatArray
    transfers: FloatArray
    gathering: FloatArray
    offloading: FloatArray

    @property
    def total(self) -> FloatArray:
        """Seconds of the microbatch."""
        return self.computing + self.transfers + self.gathering + self.offloading


@dataclass(frozen=True, slots=True, eq=False)
class MeanMicrobatch:
    """The mean microbatch of a step on the fullest replica, of many configurations ``[C]``."""

    num_microbatches: FloatArray
    """Of the step."""
    tokens: FloatArray
    layer: FloatArray
    """Seconds of one decoder layer, forward and backward."""
    connector: FloatArray
    """Seconds."""
    head: FloatArray
    """Seconds."""


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
        sending_efficiency: float | None = None,
    ) -> None:
        """times: by type of device.

        setup: its dp and tp are ignored.
        link_efficiency: share of the links' bandwidth that collectives reach.
        slices: how pipeline ranks share the layers; interleaved 1F1B with several chunks.
        sending_efficiency: share that transfers reach; None: as collectives.
        """
        self._cluster, self._model, self._workload, self._setup = cluster, model, workload, setup
        self.times = times
        self._sending_efficiency = link_efficiency if sending_efficiency is None else sending_efficiency
        self._images_s: dict[tuple[str, str, int, float], tuple[float, float]] = {}
        self._of_replicas: dict[tuple[str, int], tuple[IntArray, FloatArray]] = {}
        self.chunks = slices.chunks
        # By pipeline degree: layers of the first, the last and the longest rank, and the most that one offloads.
        depth = model.backbone.num_layers
        ranks = [layers_of_ranks(slices, depth, pp) for pp in range(1, slices.most_ranks(depth) + 1)]
        rows = ((len(each[0]), len(each[-1]), max(map(len, each)), self._most_offloaded(each)) for each in ranks)
        self._stages = np.array([(0, 0, 0, 0), *rows], dtype=np.int64)
        lengths = self._stages[:, :3]
        self.traffic = ParameterTraffic(cluster, model, setup, link_efficiency, lengths, slices.chunks, times)

    def _most_offloaded(self, ranks: Sequence[Sequence[int]]) -> int:
        words = self._setup.activation_checkpointing
        if isinstance(words, str):
            return max(map(len, ranks)) if words == "offload" else 0
        return max(sum(words[layer] == "offload" for layer in layers) for layers in ranks)

    def rate(self, candidate: Candidate) -> float:
        """Return samples/s of one configuration."""
        return float(self.rates(columns_of(candidate))[0])

    def rates(self, columns: CandidateColumns) -> FloatArray:
        """Return samples/s of many configurations, ``[C]``."""
        if columns.module == BACKBONE:
            return self._workload.global_batch_size / self.step_times(columns).total
        times = self.times[columns.device_type]
        rates = np.empty(len(columns))
        for tp in columns.tps:
            at = columns.tp == tp
            rates[at] = columns.dp[at] / times.sample_s(columns.module, tp)
        return rates

    def step_time(self, candidate: Candidate) -> StepTime:
        """Return the times of a step of one backbone configuration, as arrays of length one."""
        return self.step_times(columns_of(candidate))

    def step_times(self, columns: CandidateColumns) -> StepTime:
        """Return the times of a step of each backbone configuration."""
        each = self.mean_microbatch(columns)
        stages = self._stages_of(columns, each.layer, each.connector, each.head)
        return self.step_of(columns, each.num_microbatches, each.tokens, *stages)

    def mean_microbatch(self, columns: CandidateColumns) -> MeanMicrobatch:
        """Return the mean microbatch of each backbone configuration; it depends on dp and tp alone."""
        found = np.empty((5, len(columns)))
        for tp in columns.tps:
            at = columns.tp == tp
            found[:, at] = self._microbatches_of(columns.device_type, tp, columns.dp[at])
        return MeanMicrobatch(*found)

    def _microbatches_of(self, device_type: str, tp: int, dp: IntArray) -> FloatArray:
        """Columns of ``MeanMicrobatch``, ``[5, N]``, from a table of all dp that were asked for."""
        none = np.array([0]), np.zeros((5, 1))  # no configuration has 0 replicas
        known, table = self._of_replicas.get((device_type, tp), none)
        at = np.searchsorted(known, dp)
        is_new = known[np.minimum(at, len(known) - 1)] != dp
        if is_new.any():
            new = np.unique(dp[is_new])
            count, times = self._workload.num_microbatches(new).astype(np.float64), self.times[device_type]
            tokens = self._workload.fullest_tokens(new) / count
            parts = (part(tokens, tp) for part in (times.layer_s, times.connector_s, times.head_s))
            known, table = np.append(known, new), np.append(table, np.stack([count, tokens, *parts]), axis=1)
            order = np.argsort(known)
            known, table = self._of_replicas[device_type, tp] = known[order], table[:, order]
            at = np.searchsorted(known, dp)
        return table[:, at]

    def step_of(
        self,
        columns: CandidateColumns,
        num_microbatches: FloatArray,
        tokens: FloatArray,
        stage: FloatArray,
        mean: FloatArray,
        held: StageParameters | None = None,
    ) -> StepTime:
        """Return the times of a step of equal microbatches; all arrays are ``[C]``.

        Arguments are as in ``slot_times``. mean: as ``stage``, of a mean pipeline rank.
        """
        held = self.traffic.parameters(columns) if held is None else held
        slot = self.slot_times(columns, tokens, stage, held)
        once = self.traffic.gathering_once_s(columns, stage, held)
        return StepTime(
            computing=num_microbatches * stage - self.first_backward_s(columns, stage, held),
            transfers=num_microbatches * slot.transfers,
            gathering=num_microbatches * slot.gathering + once,
            offloading=num_microbatches * slot.offloading,
            fill=fill_s(columns.pp, num_microbatches, self.chunks, slot, mean),
            reducing=self.traffic.reducing_s(columns, stage, num_microbatches, held),
            optimizer=self.optimizer_s(columns, held),
            num_microbatches=num_microbatches.astype(np.int64),
        )

    def slot_times(
        self, columns: CandidateColumns, tokens: FloatArray, stage: FloatArray, held: StageParameters | None = None
    ) -> SlotTime:
        """Return the times of one microbatch of ``tokens`` on the slowest pipeline rank; all arrays are ``[C]``.

        stage: seconds of all layers, head and connector there. held: parameters of the fullest rank; None:
        those of the backbone.
        """
        pp, tp = columns.pp, columns.tp
        sent = np.where(pp > 1, 2.0 * self._setup.dtype_nbytes * self._model.backbone.hidden_size * tokens, 0.0)
        if self._setup.sequence_parallel:
            sent = sent / tp
        transfer = self.chunks * sent / self._sending(columns)
        held = self.traffic.parameters(columns) if held is None else held
        gathering = self.traffic.gathering_s(columns, stage, held)
        return SlotTime(stage, transfer, gathering, self._offloading_s(columns, stage, tokens))

    def once_s(
        self,
        columns: CandidateColumns,
        stage: FloatArray,
        num_microbatches: FloatArray,
        held: StageParameters | None = None,
    ) -> FloatArray:
        """Return seconds of a step besides its slots, ``[C]``: gathers made once, reductions, the optimizer.

        Less what its first backward takes less than others.

        stage: as in ``slot_times``.
        """
        held = self.traffic.parameters(columns) if held is None else held
        gathering = self.traffic.gathering_once_s(columns, stage, held)
        reducing = self.traffic.reducing_s(columns, stage, num_microbatches, held)
        saved = self.first_backward_s(columns, stage, held)
        return gathering + reducing + self.optimizer_s(columns, held) - saved

    def first_backward_s(self, columns: CandidateColumns, stage: FloatArray, held: StageParameters) -> FloatArray:
        """Return seconds that a step's first backward takes less than others, ``[C]``; arguments as of ``step_of``.

        Where each backward is reduced, gradients are added to as shards.
        """
        each = False if columns.reduces_each is None else columns.reduces_each
        added = held.trained / np.where(each, self.traffic.shards(columns), 1)
        less = self.times[columns.device_type].first_backward_s(added)
        found: FloatArray = np.minimum(less, MOST_LESS * BACKWARD_SHARE * stage)
        return found

    def shards(self, columns: CandidateColumns) -> IntArray:
        """Return the data parallel ranks that hold one set of shards, ``[C]``; 1 where the configuration has none."""
        return self.traffic.shards(columns)

    def optimizer_s(self, columns: CandidateColumns, held: StageParameters | None = None) -> FloatArray:
        """Return seconds of a step's clipping and update, ``[C]``, and of the exchange of a tied table's gradients."""
        held = self.traffic.parameters(columns) if held is None else held
        shards, backbone = self.traffic.shards(columns), self._model.backbone
        update = self.times[columns.device_type].step_s(held.trained / shards)
        if not (backbone.tied_embeddings and trains_embedding(backbone)) or BACKBONE in self._workload.freeze:
            return update
        nbytes = FLOAT32_NBYTES * backbone.head_parameters / columns.tp / shards
        return update + np.where(columns.pp > 1, nbytes / self._sending(columns), 0.0)

    def _sending(self, columns: CandidateColumns) -> FloatArray:
        """Bytes/s from a pipeline rank to another; each has its own link, whoever else is in its node."""
        device = self._cluster[columns.device_type]
        inside = columns.pp * columns.tp <= device.devices_per_node
        return np.where(inside, device.links.node, device.links.network) * self._sending_efficiency

    def _offloading_s(self, columns: CandidateColumns, stage: FloatArray, tokens: FloatArray) -> FloatArray:
        """Seconds of a microbatch's copies that its forward and its backward do not hide."""
        if not self._stages[:, 3].any():
            return np.zeros(len(columns))
        host = self._cluster[columns.device_type].links.host * self._sending_efficiency
        offloaded, copying = self._stages[columns.pp].T[3], np.empty(len(columns))
        for tp in columns.tps:
            at, setup = columns.tp == tp, replace(self._setup, tp=tp)
            per_token = layer_activation_nbytes(self._model.backbone, setup, _MANY_TOKENS) / _MANY_TOKENS
            copying[at] = offloaded[at] * per_token * tokens[at] / host
        if self._cluster[columns.device_type].name == CPU:
            return 2.0 * copying
        backward = BACKWARD_SHARE * stage
        return np.maximum(copying - (stage - backward), 0.0) + np.maximum(copying - backward, 0.0)

    def mfu(self, candidate: Candidate) -> float:
        """Return the share of the devices' peak that a module reaches while it does not wait, by model FLOPs."""
        if candidate.module == BACKBONE:
            flops = self._workload.flops(self._model)
            per_sample = float((flops.backbone + flops.connector).mean())
        else:
            per_sample = self._workload.encoder_flops(self._model, candidate.module)
        peak = candidate.devices * self._cluster[candidate.device_type].flops
        return per_sample * candidate.rate / peak

    def stages_s(self, columns: CandidateColumns, tokens: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return seconds of forward and backward of one microbatch on the slowest and a mean pipeline rank, ``[C]``."""
        times, parts = self.times[columns.device_type], np.empty((3, len(columns)))
        for tp in columns.tps:
            at = columns.tp == tp
            parts[:, at] = [part(tokens[at], tp) for part in (times.layer_s, times.connector_s, times.head_s)]
        return self._stages_of(columns, *parts)

    def _stages_of(
        self, columns: CandidateColumns, layer: FloatArray, connector: FloatArray, head: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """As ``stages_s``, by the seconds of the parts of each one's microbatch."""
        first, last, longest, _ = self._stages[columns.pp].T
        ends = np.maximum(first * layer + connector, last * layer + head)
        alone = self._model.backbone.num_layers * layer + connector + head
        slowest = np.where(columns.pp == 1, alone, np.maximum(longest * layer, ends))
        calls = calls_s(self.times[columns.device_type], columns, self.chunks)
        return slowest + calls, alone / columns.pp + calls

    def images_in_ranks_s(self, device_type: str, encoder: str, tp: int, together: float) -> tuple[float, float]:
        """Return the mean and the least seconds of a sample's images, where ranks forward so many images at once."""
        key = device_type, encoder, tp, together
        if key not in self._images_s:
            seconds = self.times[device_type].images_s(encoder, tp, together=together)
            self._images_s[key] = float(seconds.mean()), float(seconds.min())
        return self._images_s[key]

    def busy_s(self, columns: CandidateColumns, step: StepTime) -> FloatArray:
        """Return seconds of a step in which a mean device of the backbone has no time for anything else, ``[C]``.

        An accelerator also computes for others during gathers and reductions, but a CPU's cores do these themselves. Of
        a pipeline's waits hardly any is free: while one rank shares its device, those after it wait.
        """
        if self._cluster[columns.device_type].name == CPU:
            return step.total
        return np.where(columns.pp == 1, step.computing + step.optimizer, step.total)


def calls_s(times: ModuleTimes, columns: CandidateColumns, chunks: int) -> FloatArray:
    """Return seconds of a microbatch on a pipeline rank in addition to what it computes, ``[C]``.

    A rank fetches it once, runs it through each chunk, and starts two transfers and waits for them at both ends of
    each: hidden states and their gradients. With two ranks, one of each rank's ends is that of the model.
    """
    ends = np.where(columns.pp > 2, 4 * chunks, np.where(columns.pp == 2, 4 * chunks - 2, 0))
    passing = times.pass_s * np.where(columns.pp > 1, chunks, 1)
    seconds: FloatArray = times.microbatch_s(columns.pp * columns.tp) + passing + times.launch_s * ends
    return seconds


def fill_slots(pp: IntArray, num_microbatches: FloatArray, chunks_per_rank: int) -> FloatArray:
    """Return the number of slots that a pipeline rank idles in a step; arrays are ``[N]``.

    A slot is the time of one microbatch on one rank. 1F1B idles pp - 1 slots. With several chunks per rank, it idles
    one chunk's share of that (Narayanan et al. 2021, section 2.2). With fewer microbatches than ranks, each further
    chunk also waits for its first microbatch.
    """
    short = np.maximum(pp - num_microbatches, 0.0)
    return ((pp - 1) + (chunks_per_rank - 1) * short) / chunks_per_rank


def fill_s(
    pp: IntArray, num_microbatches: FloatArray, chunks_per_rank: int, slot: SlotTime, mean: FloatArray
) -> FloatArray:
    """Return seconds of a step in which the pipeline fills and drains; all arrays are ``[N]``.

    A rank waits for the others then, which need not be as slow as the slowest. mean: seconds of computing on a mean
    rank.
    """
    others = (pp * mean - slot.computing) / np.maximum(pp - 1, 1)
    moving = slot.transfers + slot.gathering + slot.offloading
    return fill_slots(pp, num_microbatches, chunks_per_rank) * (others + moving)


def columns_of(candidate: Candidate) -> CandidateColumns:
    """Return one configuration as columns of length one."""
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
