"""Ranks with encoder and backbone layers (``mode: monolithic``): their times and memory, by the run's own partition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import get_args

import numpy as np

from flowtrain.allocator.candidates import Candidate, CandidateColumns
from flowtrain.allocator.degrees import encoder_degree_faults
from flowtrain.allocator.parameter_traffic import StageParameters, joined
from flowtrain.allocator.request import Request
from flowtrain.allocator.run_memory import memory_of_ranks, monolithic_size
from flowtrain.allocator.slices import Slices
from flowtrain.allocator.surrogate import BACKBONE, Surrogate, calls_s, fill_slots
from flowtrain.costs.action_times import MOST_LESS
from flowtrain.costs.collectives import BACKWARD_SHARE
from flowtrain.costs.flops import FloatArray, IntArray
from flowtrain.costs.memory import StepMemory
from flowtrain.costs.model_spec import ModelSpec, TransformerSpec, VisionSpec
from flowtrain.costs.module_times import ModuleTimes
from flowtrain.errors import ConfigError
from flowtrain.pipeline.actions import StageModule
from flowtrain.pipeline.configured import encoder_layer_cost
from flowtrain.pipeline.partition import EncoderSplit, Partition, build_partition
from flowtrain.types.plan import Degrees
from flowtrain.types.run_plan import EncoderPlace

PLACES: tuple[EncoderPlace, ...] = get_args(EncoderPlace)


@dataclass(frozen=True, slots=True, eq=False)
class RankLoads:
    """What each pipeline rank has of the model, ``[R]``."""

    encoder_share: FloatArray
    """Share of the encoder's layers."""
    has_images: FloatArray
    """1 for the rank that embeds images."""
    layers: FloatArray
    """Decoder layers."""
    has_connector: FloatArray
    """1 for the rank with connector and embedding."""
    has_head: FloatArray

    def stage_s(self, encoder: FloatArray, layer: FloatArray, connector: FloatArray, head: FloatArray) -> FloatArray:
        """Return each rank's seconds of a microbatch, ``[R, N]``, from those of the parts, ``[N]``."""
        decoder = self.layers[:, None] * layer + self.has_connector[:, None] * connector + self.has_head[:, None] * head
        return self.encoder_share[:, None] * encoder + decoder


def encoder_of(model: ModelSpec) -> tuple[str, VisionSpec]:
    """Return the only encoder."""
    ((name, spec),) = model.encoders.items()
    return name, spec


def is_trained(request: Request) -> bool:
    """Whether the encoder is trained."""
    return "encoders" not in request.workload.freeze


def monolithic_partition(request: Request, pp: int, place: EncoderPlace) -> Partition:
    """Return the partition of a run (``pipeline.configured``); ConfigError if the layers cannot be cut so."""
    return _partition(_Cut.of(request), pp, place)


def rank_loads(request: Request, pp: int, place: EncoderPlace) -> RankLoads:
    """Return the loads of the ranks of a partition; ConfigError as ``monolithic_partition``."""
    return _loads(_Cut.of(request), pp, place)


@dataclass(frozen=True, slots=True)
class _Cut:
    """What of a request its partitions depend on."""

    encoder: VisionSpec
    backbone: TransformerSpec
    trains_encoder: bool
    freezes_backbone: bool
    slices: Slices

    @classmethod
    def of(cls, request: Request) -> _Cut:
        _, encoder = encoder_of(request.model)
        freezes_backbone = "backbone" in request.workload.freeze
        return cls(encoder, request.model.backbone, is_trained(request), freezes_backbone, request.slices)


@lru_cache(maxsize=4096)
def _partition(cut: _Cut, pp: int, place: EncoderPlace) -> Partition:
    slices, backbone = cut.slices, cut.backbone
    cost = encoder_layer_cost(cut.encoder, backbone, cut.trains_encoder, cut.freezes_backbone)
    split = EncoderSplit(cut.encoder.num_layers, place, cost, cut.trains_encoder)
    is_for_place = slices.counts_encoder == (place == "mixed")
    counts = slices.counts_for(pp) if is_for_place else None
    return build_partition(
        backbone.num_layers, pp, slices.chunks, counts=counts, encoder=split, first_layers=backbone.first_layers
    )


@lru_cache(maxsize=4096)
def _loads(cut: _Cut, pp: int, place: EncoderPlace) -> RankLoads:
    partition = _partition(cut, pp, place)
    layers = {module: np.zeros(partition.pp_size) for module in StageModule}
    for stage in partition.stages:
        layers[stage.module][stage.rank] += len(stage.layers)
    ranks = np.arange(partition.pp_size)
    images, tokens, last = partition.entry_rank, partition.token_rank, partition.stages[-1].rank
    return RankLoads(
        layers[StageModule.ENCODER] / cut.encoder.num_layers,
        (ranks == images).astype(np.float64),
        layers[StageModule.BACKBONE],
        (ranks == tokens).astype(np.float64),
        (ranks == last).astype(np.float64),
    )


def splits_encoder(request: Request, tp: int) -> bool:
    """Whether ranks can split the encoder by a tensor parallel degree."""
    name, spec = encoder_of(request.model)
    if tp == 1:
        return True
    return not (name in request.whole or encoder_degree_faults(name, tp, spec) or spec.intermediate_size % tp)


def images_of_rank_s(request: Request, surrogate: Surrogate, columns: CandidateColumns) -> FloatArray:
    """Return seconds of all images of a step on the fullest replica, ``[C]``, as ``Workload.fullest_tokens``."""
    (name, _), workload = encoder_of(request.model), request.workload
    seconds, mean = np.empty(len(columns)), workload.global_batch_size / columns.dp
    images = workload.images[name][0]
    of_sample = float(images[images > 0].mean()) if images.any() else 1.0  # at least, where there are any
    of_microbatch = mean * float(images.mean()) / workload.num_microbatches(columns.dp)
    together = np.rint(np.maximum(of_microbatch, of_sample))  # whole, so that few differ
    more = np.ceil(mean - 1e-9) - mean
    for tp in columns.tps:
        of_tp = columns.tp == tp
        batches, which = np.unique(together[of_tp], return_inverse=True)
        found = [surrogate.images_in_ranks_s(columns.device_type, name, tp, each) for each in batches.tolist()]
        each, least = np.array(found).T[:, which]
        seconds[of_tp] = mean[of_tp] * each + more[of_tp] * least
    return seconds


@dataclass(frozen=True, slots=True, eq=False)
class PartTimes:
    """Seconds of a mean microbatch on the fullest replica, by part of the model, of many configurations ``[C]``."""

    num_microbatches: FloatArray
    """Of the step; no seconds."""
    tokens: FloatArray
    """Of the microbatch; no seconds."""
    encoder: FloatArray
    """All its layers."""
    layer: FloatArray
    """One decoder layer."""
    connector: FloatArray
    head: FloatArray
    calls: FloatArray
    """Of each rank beside them (``surrogate.calls_s``)."""
    saved: FloatArray
    """What the first backward of a rank with all of the model would save (``Surrogate.first_backward_s``)."""

    @classmethod
    def of(cls, request: Request, surrogate: Surrogate, columns: CandidateColumns) -> PartTimes:
        """Return those of some configurations."""
        each = surrogate.mean_microbatch(columns)
        encoder = images_of_rank_s(request, surrogate, columns) / each.num_microbatches
        times = surrogate.times[columns.device_type]
        calls = calls_s(times, columns, request.slices.chunks)
        saved = times.first_backward_s(request.model.num_parameters / columns.tp)
        return cls(each.num_microbatches, each.tokens, encoder, each.layer, each.connector, each.head, calls, saved)

    def __getitem__(self, chosen: IntArray) -> PartTimes:
        """Return those of some of them, by index."""
        return PartTimes(*(getattr(self, each.name)[chosen] for each in fields(PartTimes)))


def least_step_s(request: Request, columns: CandidateColumns, parts: PartTimes) -> FloatArray:
    """Return seconds that no partition can be below, ``[C]``. parts: of the columns.

    Some rank has no less than an even share of all, nor than the decoder layers of an even share, rounded up.
    """
    pp, depth, num_microbatches = columns.pp, request.model.backbone.num_layers, parts.num_microbatches
    mean = (depth * parts.layer + parts.connector + parts.head + parts.encoder) / pp + parts.calls
    slowest = np.where(pp == 1, mean, np.maximum(-(-depth // pp) * parts.layer, mean))
    slots = fill_slots(pp, num_microbatches, request.slices.chunks)
    # Other ranks wait for the slowest in each microbatch, and it waits for them in each slot of the fill.
    shared = np.minimum(slots / np.maximum(pp - 1, 1), num_microbatches)
    seconds = shared * pp * mean + (num_microbatches - shared) * slowest
    return np.maximum(seconds - parts.saved, (1.0 - MOST_LESS * BACKWARD_SHARE) * seconds)


def step_s(request: Request, surrogate: Surrogate, columns: CandidateColumns, place: EncoderPlace) -> FloatArray:
    """Return seconds of a step, ``[C]``; all columns have one pp and tp. ConfigError as ``monolithic_partition``."""
    return steps_s(request, surrogate, columns, (place,))[0]


def steps_s(
    request: Request,
    surrogate: Surrogate,
    columns: CandidateColumns,
    places: Sequence[EncoderPlace],
    parts: PartTimes | None = None,
) -> FloatArray:
    """Return seconds of a step with the encoder at each of some places, ``[places, C]``; otherwise as ``step_s``.

    parts: of these columns, if they are known.
    """
    parts = PartTimes.of(request, surrogate, columns) if parts is None else parts
    loads = [rank_loads(request, int(columns.pp[0]), place) for place in places]
    own = surrogate.times[columns.device_type]
    calls = [parts.calls + own_calls_s(request, own, columns, place) for place in places]
    stages = [
        each.stage_s(parts.encoder, parts.layer, parts.connector, parts.head) + added
        for each, added in zip(loads, calls, strict=True)
    ]
    every = columns[np.tile(np.arange(len(columns)), len(places))]
    step = surrogate.step_of(
        every,
        np.tile(parts.num_microbatches, len(places)),
        np.tile(parts.tokens, len(places)),
        np.concatenate([each.max(axis=0) for each in stages]),
        np.concatenate([each.mean(axis=0) for each in stages]),
        joined([held(request, columns, each) for each in loads]),
    )
    seconds: FloatArray = step.total.reshape(len(places), -1)
    return seconds + [own_fill_s(request, columns, place, parts.encoder) for place in places]


def own_fill_s(request: Request, columns: CandidateColumns, place: EncoderPlace, encoder: FloatArray) -> FloatArray:
    """Return seconds of a step's fill beside ``surrogate.fill_s``, ``[C]``.

    An encoder in stages of its own is a pass over the ranks that chunks of the backbone do not shorten. encoder:
    seconds of a microbatch's images on all ranks together.
    """
    if place != "own":
        return np.zeros(len(columns))
    return (columns.pp - 1) * (1.0 - 1.0 / request.slices.chunks) * encoder / columns.pp


def own_calls_s(request: Request, times: ModuleTimes, columns: CandidateColumns, place: EncoderPlace) -> FloatArray:
    """Return seconds of a microbatch on a rank beside ``surrogate.calls_s``, ``[C]``.

    A chunk of encoder stages takes a transfer in and out of each rank, and with a backward two more.
    """
    ends = (4 if is_trained(request) else 2) if place == "own" else 0
    return np.where(columns.pp > 1, ends * times.launch_s, 0.0)


def held(request: Request, columns: CandidateColumns, loads: RankLoads) -> StageParameters:
    """Return what the fullest rank holds in shards, frozen encoder layers aside; all columns have the same tp."""
    model, tp = request.model, int(columns.tp[0])
    _, spec = encoder_of(model)
    backbone, trained = model.backbone, float(is_trained(request))
    tables = loads.has_connector + loads.has_head
    if backbone.tied_embeddings:
        tables = np.minimum(tables, 1.0)
    outer = tables * backbone.head_parameters + loads.has_connector * model.connector.num_parameters
    encoder_outer = trained * loads.has_images * (spec.outside_parameters - spec.unused_parameters)
    layers = loads.layers * backbone.layer_parameters
    encoder_layers = trained * loads.encoder_share * spec.num_layers * spec.layer_parameters
    of_encoder, of_all = encoder_layers + encoder_outer, layers + outer + encoder_layers + encoder_outer
    fullest = int(np.argmax(of_all))
    one = np.ones(len(columns))
    return StageParameters(
        (layers + encoder_layers)[fullest] / tp * one,
        (outer + encoder_outer)[fullest] / tp * one,
        backbone.layer_parameters / tp * one,
        (of_encoder + model.trained_share * (layers + outer))[fullest] / tp * one,
    )


def memory(request: Request, candidate: Candidate, place: EncoderPlace) -> StepMemory:
    """Return the predicted memory of the fullest rank. request: with the candidate's settings."""
    degrees, num_microbatches = candidate.degrees, _num_microbatches(request, candidate)
    setup = replace(
        request.setup,
        dp=degrees.dp,
        tp=degrees.tp,
        accumulates=num_microbatches > 1,
        shard_size=request.num_shards(candidate),
        gradient_reduction=candidate.gradient_reduction,
    )
    partition, size = monolithic_partition(request, degrees.pp, place), monolithic_size(request.model, request.workload)
    ranks = memory_of_ranks(request.model, partition, setup, size, num_microbatches)
    return max(ranks, key=lambda rank: rank.peak)


def added_nbytes(request: Request) -> int:
    """Return how much memory a single rank with the whole encoder takes more; for where to search, not to decide."""
    alone = Candidate(BACKBONE, request.cluster.device_types[0].name, Degrees())
    return memory(request, alone, PLACES[0]).peak - request.backbone_memory(alone).peak


def groups(columns: CandidateColumns) -> Iterator[IntArray]:
    """Yield the indices of the columns of each (tp, pp), in their order."""
    order = np.lexsort((columns.pp, columns.tp))
    shapes = np.stack([columns.tp[order], columns.pp[order]])
    ends = np.flatnonzero(np.any(np.diff(shapes, axis=1), axis=0)) + 1
    yield from np.split(order, ends) if len(order) else ()


def places(request: Request, pp: int) -> tuple[EncoderPlace, ...]:
    """Return where the encoder may lie; with one rank there is one place.

    A given partition, which a run has in any case, is for the places whose layers it counts.
    """
    slices = request.slices
    every = [each for each in PLACES if slices.counts_for(pp) is None or (each == "mixed") == slices.counts_encoder]
    if pp == 1:
        return (every[0],)
    found = []
    for place in every:
        try:
            monolithic_partition(request, pp, place)
        except ConfigError:
            continue
        found.append(place)
    return tuple(found)


def _num_microbatches(request: Request, candidate: Candidate) -> int:
    return int(request.workload.num_microbatches(np.array([candidate.degrees.dp]))[0])
