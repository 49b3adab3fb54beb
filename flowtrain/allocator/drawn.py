"""Rates of configurations by packed batches of the data's real lengths, where the surrogate has means alone.

A step's slots wait for their slowest replica, whatever its microbatch holds, because gathers of parameters join the
replicas. A microbatch's time is that of as many average tokens as its FLOPs are worth.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flowtrain.allocator.candidates import CandidateColumns
from flowtrain.allocator.drawn_batches import DrawnBatches, PackedBatches
from flowtrain.allocator.drawn_flow import DrawnStep, EncodedStep, finishes
from flowtrain.allocator.mode_candidate import ModeCandidate
from flowtrain.allocator.request import Request
from flowtrain.allocator.surrogate import Surrogate, columns_of, fill_slots
from flowtrain.costs.flops import FloatArray, IntArray
from flowtrain.pipeline.actions import StageModule
from flowtrain.pipeline.configured import encoder_layer_cost
from flowtrain.pipeline.partition import EncoderSplit, build_partition

_STEPS = 24
"""Least number of steps that encoders and backbone run through; the second half counts."""
_ROUNDS = 4
"""Least number of times that they run through all batches."""


@dataclass(frozen=True, slots=True)
class DrawnRate:
    """What drawn batches give."""

    rate: float
    """Samples/s of the run."""
    imbalance: float
    """Computing time of the slots' slowest replicas over that of all, minus one."""
    starved: float
    """Share of its time that the backbone waits for encoders."""


def drawn_rate(
    request: Request, surrogate: Surrogate, candidate: ModeCandidate, batches: DrawnBatches, slowdown: float = 1.0
) -> DrawnRate:
    """Return the rate of one configuration.

    request, surrogate: those of its settings.
    slowdown: in ``colocated``, the time of encoder and backbone at once on a device over the sum of both alone.
    """
    packed = batches.packed(request, candidate.backbone.degrees.dp)
    backbone = _Backbone.of(request, surrogate, candidate, packed)
    steps = _steps(request, surrogate, candidate, packed, backbone, slowdown)
    replicas = [_replicas(each.degrees.dp, packed) for each in candidate.encoders.values()]
    rounds = max(_ROUNDS, 2 * -(-_STEPS // (2 * len(steps))))
    num_steps = rounds * len(steps)
    ends = finishes(
        steps,
        replicas,
        batches.scheduler.lookahead_steps,
        is_barrier=candidate.mode == "disaggregated",
        num_steps=num_steps,
    )
    half = num_steps // 2
    seconds = float(ends[-1] - ends[half - 1]) / half
    alone = sum(step.backbone_s for step in steps) / len(steps)
    return DrawnRate(request.workload.global_batch_size / seconds, backbone.imbalance, max(0.0, 1.0 - alone / seconds))


@dataclass(frozen=True, slots=True, eq=False)
class _Backbone:
    """Times of the backbone over all batches; in ``monolithic`` with the encoder."""

    slots: tuple[FloatArray, ...]
    """By batch: seconds of each slot, by the slowest replica."""
    rest_s: FloatArray
    """Pipeline fill, reductions and optimizer, ``[B]``."""
    busy_s: FloatArray
    """Seconds in which a mean device computes, ``[B]``."""
    imbalance: float

    @classmethod
    def of(cls, request: Request, surrogate: Surrogate, candidate: ModeCandidate, packed: PackedBatches) -> _Backbone:
        one, ends = columns_of(candidate.backbone), packed.slot_ends
        tokens = packed.sums(_worth_tokens(request))
        columns = _repeated(one, tokens.size)
        if candidate.mode == "monolithic":
            stage = _monolithic_stage_s(request, surrogate, candidate, packed, tokens)
        else:
            stage = surrogate.stage_s(columns, tokens.reshape(-1))
        each = surrogate.slot_times(columns, tokens.reshape(-1), stage)
        computing, total = each.computing.reshape(tokens.shape), each.total.reshape(tokens.shape)
        # Replicas that share no shards run on their own until the step's reduction.
        shards = int(surrogate.shards(one)[0])
        in_groups = total.shape[1] % shards == 0 and shards < total.shape[1]
        groups = total.reshape(len(total), -1, shards if in_groups else total.shape[1]).max(axis=2)
        slots = tuple(each[:, each.sum(axis=0).argmax()] for each in np.split(groups, ends[:-1]))
        counts = np.array([len(each) for each in slots], dtype=np.float64)
        mean_slot = np.array([float(each.mean()) for each in slots])
        mean_computing = np.array([float(each.mean()) for each in np.split(computing, ends[:-1])])
        columns = _repeated(one, len(slots))
        rest = fill_slots(columns.pp, counts, surrogate.chunks) * mean_slot
        rest = rest + surrogate.once_s(columns, mean_computing, counts)
        busy = counts * mean_computing + surrogate.optimizer_s(columns)
        imbalance = float(computing.max(axis=1).sum() / computing.mean(axis=1).sum()) - 1.0
        return cls(slots, rest, busy, imbalance)


def _steps(
    request: Request,
    surrogate: Surrogate,
    candidate: ModeCandidate,
    packed: PackedBatches,
    backbone: _Backbone,
    slowdown: float,
) -> list[DrawnStep]:
    encoded = [_encoded(request, surrogate, candidate, packed, name) for name in candidate.encoders]
    steps = []
    for index, (slots, rest, busy) in enumerate(zip(backbone.slots, backbone.rest_s, backbone.busy_s, strict=True)):
        own = tuple(each[index] for each in encoded)
        work = encode = 0.0
        if candidate.mode == "colocated":
            work, encode = slowdown * float(busy), 0.0
            for each, chosen in zip(own, candidate.encoders.values(), strict=True):
                replicas = _replicas(chosen.degrees.dp, packed)
                devices = candidate.backbone.devices / chosen.degrees.world_size
                encode += slowdown * sum(each.seconds) / replicas / devices
        steps.append(DrawnStep(slots, float(rest), own, work, encode))
    return steps


def _encoded(
    request: Request, surrogate: Surrogate, candidate: ModeCandidate, packed: PackedBatches, name: str
) -> list[EncodedStep]:
    """One encoder's batches of each step, cut from the order in which the backbone needs the samples."""
    chosen = candidate.encoders[name]
    num_images, num_patches = request.workload.images[name]
    replicas = _replicas(chosen.degrees.dp, packed)
    # So many replicas are as fast as the share of all that the packed share of the batch has.
    scale = replicas / (chosen.degrees.dp * packed.share)
    seconds = scale * surrogate.times[chosen.device_type].images_s(name, chosen.degrees.tp)
    slots = packed.places // packed.dp
    found = []
    for first, last in zip([0, *packed.slot_ends[:-1]], packed.slot_ends, strict=True):
        start, end = np.searchsorted(slots, [first, last])
        samples, own_slots = packed.samples[start:end], slots[start:end] - first
        with_images = num_images[samples] > 0
        samples, own_slots = samples[with_images], own_slots[with_images]
        batch = _batch_numbers(num_patches[samples], request.max_batch_patches[name])
        durations = np.bincount(batch, seconds[samples])
        # Batches until the last sample of each slot.
        ends = np.searchsorted(own_slots, np.arange(last - first), side="right")
        needed = np.concatenate([[0], batch + 1])[ends]
        found.append(EncodedStep(tuple(durations.tolist()), needed))
    return found


def _batch_numbers(patches: IntArray, limit: int) -> IntArray:
    """Return the number of each sample's encode batch, ``[N]``, ascending from 0 without gaps.

    A run fills a batch until the next sample exceeds the limit; here one ends wherever the sum passes a multiple of it.
    """
    if not len(patches):
        return np.zeros(0, dtype=np.int64)
    passed = (np.cumsum(patches) - 1) // limit
    return np.concatenate([[0], np.cumsum(np.diff(passed) > 0)]).astype(np.int64)


def _replicas(replicas: int, packed: PackedBatches) -> int:
    """Replicas of an encoder for the packed share of a batch."""
    return max(1, round(replicas * packed.share))


def _worth_tokens(request: Request) -> FloatArray:
    """Tokens of the data's mix that have as many FLOPs in backbone and connector as each sample, ``[S]``."""
    flops = request.workload.flops(request.model)
    worth = flops.backbone + flops.connector
    return worth * (request.workload.tokens_per_sample / float(worth.mean()))


def _monolithic_stage_s(
    request: Request, surrogate: Surrogate, candidate: ModeCandidate, packed: PackedBatches, tokens: FloatArray
) -> FloatArray:
    """Seconds of each microbatch on its slowest pipeline rank, with the encoder's layers where they lie; flat."""
    times, degrees = surrogate.times[candidate.backbone.device_type], candidate.backbone.degrees
    name = next(iter(request.model.encoders))
    flat = tokens.reshape(-1)
    encoder = packed.sums(times.images_s(name, degrees.tp)).reshape(-1)
    layer = times.layer_s(flat, degrees.tp)
    connector, head = times.connector_s(flat, degrees.tp), times.head_s(flat, degrees.tp)
    slowest = np.zeros_like(flat)
    for share, layers, has_connector, has_head in _ranks(request, candidate):
        slowest = np.maximum(slowest, share * encoder + layers * layer + has_connector * connector + has_head * head)
    return slowest + surrogate.chunks * times.microbatch_s()


def _ranks(request: Request, candidate: ModeCandidate) -> set[tuple[float, int, bool, bool]]:
    """Each different pipeline rank: its share of the encoder, its decoder layers, whether it has connector and head."""
    (spec,), backbone = request.model.encoders.values(), request.model.backbone
    freeze, pp = request.workload.freeze, candidate.backbone.degrees.pp
    is_trained = "encoders" not in freeze
    cost = encoder_layer_cost(spec, backbone, is_trained, "backbone" in freeze)
    split = EncoderSplit(spec.num_layers, candidate.encoder_layers or "first", cost, is_trained)
    counts = request.slices.counts_for(pp)
    partition = build_partition(backbone.num_layers, pp, request.slices.chunks, counts=counts, encoder=split)
    last = partition.stages[-1].rank
    found = set()
    for rank in range(pp):
        layers = dict.fromkeys(StageModule, 0)
        for stage in partition.of_rank(rank):
            layers[stage.module] += len(stage.layers)
        share = layers[StageModule.ENCODER] / spec.num_layers
        found.add((share, layers[StageModule.BACKBONE], rank == partition.token_rank, rank == last))
    return found


def _repeated(columns: CandidateColumns, count: int) -> CandidateColumns:
    """Return one configuration as so many."""
    dp, pp, tp = (np.repeat(each, count) for each in (columns.dp, columns.pp, columns.tp))
    each = np.repeat(columns.reduces_each, count) if columns.reduces_each is not None else None
    return CandidateColumns(columns.module, columns.device_type, dp, pp, tp, each, columns.settings)
