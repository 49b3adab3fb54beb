"""Rates of configurations by packed batches of the data's real lengths, where the surrogate has means alone.

A step's slots wait for their slowest replica, whatever its microbatch holds, because gathers of parameters join the
replicas. A microbatch's time is that of as many average tokens as its FLOPs are worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flowtrain.allocator import monolithic
from flowtrain.allocator.candidates import Candidate, CandidateColumns
from flowtrain.allocator.drawn_batches import DrawnBatches, PackedBatches
from flowtrain.allocator.drawn_flow import DrawnStep, finishes
from flowtrain.allocator.mode_candidate import ModeCandidate
from flowtrain.allocator.parameter_traffic import StageParameters
from flowtrain.allocator.request import Request
from flowtrain.allocator.surrogate import SlotTime, Surrogate, calls_s, columns_of, fill_s
from flowtrain.costs.flops import FloatArray, IntArray
from flowtrain.costs.profile_together import encoding_adds_s
from flowtrain.costs.profiled_times import CPU
from flowtrain.simulator.encoders import EncodedStep

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
    idle_s: float
    """Device seconds of a step in which encoders on devices of their own have nothing to do."""


@dataclass(frozen=True, slots=True, eq=False)
class DrawnWork:
    """The work of a configuration's steps, whenever its encoders may begin."""

    steps: tuple[DrawnStep, ...]
    imbalance: float
    """As in ``DrawnRate``."""

    @classmethod
    def of(
        cls,
        request: Request,
        surrogate: Surrogate,
        candidate: ModeCandidate,
        batches: DrawnBatches,
        slowdown: float = 1.0,
    ) -> DrawnWork:
        """Return that of one configuration; arguments are those of ``drawn_rate``."""
        packed = batches.packed(request, candidate.backbone.degrees.dp)
        backbone = _Backbone.of(request, surrogate, candidate, packed)
        return cls(tuple(_steps(request, surrogate, candidate, packed, backbone, slowdown)), backbone.imbalance)


def drawn_rate(
    request: Request, surrogate: Surrogate, candidate: ModeCandidate, batches: DrawnBatches, slowdown: float = 1.0
) -> DrawnRate:
    """Return the rate of one configuration.

    request, surrogate: those of its settings.
    slowdown: in ``colocated``, the time of encoder and backbone at once on a device over the sum of both alone.
    """
    return rate_of(request, candidate, batches, DrawnWork.of(request, surrogate, candidate, batches, slowdown))


def rate_of(request: Request, candidate: ModeCandidate, batches: DrawnBatches, work: DrawnWork) -> DrawnRate:
    """Return the rate of one configuration, whose work is known."""
    packed, steps = batches.packed(request, candidate.backbone.degrees.dp), work.steps
    replicas = [replicas_of(each, packed) for each in candidate.encoders.values()]
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
    idle = 0.0
    if candidate.mode != "colocated":
        idle = sum(
            _idle_s(each, steps, index, seconds, packed) for index, each in enumerate(candidate.encoders.values())
        )
    rate = request.workload.global_batch_size / seconds
    return DrawnRate(rate, work.imbalance, max(0.0, 1.0 - alone / seconds), idle)


def _idle_s(encoder: Candidate, steps: Sequence[DrawnStep], index: int, step_s: float, packed: PackedBatches) -> float:
    """Device seconds of a step that an encoder leaves over. index: its place in each step's encoders."""
    replicas = replicas_of(encoder, packed)
    busy_s = sum(float(step.encoded[index].seconds.sum()) for step in steps) / len(steps) / replicas
    return encoder.degrees.world_size * max(0.0, step_s - busy_s)


@dataclass(frozen=True, slots=True, eq=False)
class _Microbatches:
    """Times of the microbatches of all batches, in the order of their places; all arrays are ``[N]``."""

    columns: CandidateColumns
    held: StageParameters
    """On the fullest rank."""
    each: SlotTime
    """On the slowest pipeline rank."""
    mean: FloatArray
    """Seconds of computing on a mean rank."""
    fill: FloatArray
    """Seconds of a step's pipeline fill if all microbatches were like this one."""

    @classmethod
    def of(
        cls, request: Request, surrogate: Surrogate, candidate: ModeCandidate, packed: PackedBatches
    ) -> _Microbatches:
        tokens = packed.sums(_worth_tokens(request)).reshape(-1)
        counts = np.diff(packed.slot_ends, prepend=0)
        num_microbatches = np.repeat(counts, counts * packed.dp).astype(np.float64)
        columns = _repeated(candidate.backbone, len(tokens))
        if candidate.mode == "monolithic":
            return cls._monolithic(request, surrogate, candidate, packed, columns, tokens, num_microbatches)
        held = surrogate.traffic.parameters(columns)
        slowest, mean = surrogate.stages_s(columns, tokens)
        each = surrogate.slot_times(columns, tokens, slowest, held)
        return cls(columns, held, each, mean, fill_s(columns.pp, num_microbatches, surrogate.chunks, each, mean))

    @classmethod
    def _monolithic(
        cls,
        request: Request,
        surrogate: Surrogate,
        candidate: ModeCandidate,
        packed: PackedBatches,
        columns: CandidateColumns,
        tokens: FloatArray,
        num_microbatches: FloatArray,
    ) -> _Microbatches:
        degrees, place = candidate.backbone.degrees, candidate.encoder_layers or "first"
        times, loads = surrogate.times[columns.device_type], monolithic.rank_loads(request, degrees.pp, place)
        name, _ = monolithic.encoder_of(request.model)
        num_images = packed.sums(request.workload.images[name][0])
        together = num_images.sum() / np.maximum(np.count_nonzero(num_images), 1)
        encoder = packed.sums(times.images_s(name, degrees.tp, together=together)).reshape(-1)
        parts = (part(tokens, degrees.tp) for part in (times.layer_s, times.connector_s, times.head_s))
        calls = calls_s(times, columns, surrogate.chunks) + monolithic.own_calls_s(request, times, columns, place)
        stages = loads.stage_s(encoder, *parts) + calls
        held, mean = monolithic.held(request, columns, loads), stages.mean(axis=0)
        each = surrogate.slot_times(columns, tokens, stages.max(axis=0), held)
        fill = fill_s(columns.pp, num_microbatches, surrogate.chunks, each, mean)
        return cls(columns, held, each, mean, fill + monolithic.own_fill_s(request, columns, place, encoder))


@dataclass(frozen=True, slots=True, eq=False)
class _Backbone:
    """Times of the backbone over all batches; in ``monolithic`` with the encoder."""

    slots: tuple[FloatArray, ...]
    """By batch: seconds of each slot, by the slowest replica."""
    rest_s: FloatArray
    """Pipeline fill, gathers made once, reductions and optimizer, ``[B]``."""
    busy_s: FloatArray
    """Seconds in which a mean device has no time for anything else, ``[B]``; as ``Surrogate.busy_s``."""
    imbalance: float

    @classmethod
    def of(cls, request: Request, surrogate: Surrogate, candidate: ModeCandidate, packed: PackedBatches) -> _Backbone:
        found = _Microbatches.of(request, surrogate, candidate, packed)
        total, computing = (each.reshape(-1, packed.dp) for each in (found.each.total, found.each.computing))
        # Replicas that share no shards run on their own until the step's reduction.
        shards = int(surrogate.shards(found.columns)[0])
        in_groups = shards < packed.dp and packed.dp % shards == 0
        groups = total.reshape(len(total), -1, shards if in_groups else packed.dp).max(axis=2)
        slots = tuple(each[:, each.sum(axis=0).argmax()] for each in np.split(groups, packed.slot_ends[:-1]))
        firsts = np.concatenate([[0], packed.slot_ends[:-1]])
        counts = np.diff(packed.slot_ends, prepend=0).astype(np.float64)

        def mean(values: FloatArray) -> FloatArray:
            """Of a column over the microbatches of each batch, ``[B]``."""
            return np.add.reduceat(values, firsts * packed.dp) / (counts * packed.dp)

        alike = np.arange(len(counts))
        one, held = found.columns[alike], found.held.of(alike)
        once = surrogate.once_s(one, mean(found.each.computing), counts, held)
        rest = mean(found.fill) + once
        if candidate.backbone.degrees.pp > 1:
            busy = np.array([each.sum() for each in slots]) + rest
        elif request.cluster[one.device_type].name == CPU:
            busy = counts * mean(found.mean + found.each.total - found.each.computing) + once
        else:
            saved = surrogate.first_backward_s(one, mean(found.each.computing), held)
            busy = counts * mean(found.mean) - saved + surrogate.optimizer_s(one, held)
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
    encoded = [encoded_steps(request, surrogate, candidate, packed, name) for name in candidate.encoders]
    steps = []
    for index, (slots, rest, busy) in enumerate(zip(backbone.slots, backbone.rest_s, backbone.busy_s, strict=True)):
        own = tuple(each[index] for each in encoded)
        work = encode = 0.0
        if candidate.mode == "colocated":
            work = float(busy)
            encode = shared_encode_s(candidate, own, packed, work, slowdown)
        steps.append(DrawnStep(slots, float(rest), own, work, encode))
    return steps


def shared_encode_s(
    candidate: ModeCandidate, encoded: Sequence[EncodedStep], packed: PackedBatches, work_s: float, slowdown: float
) -> float:
    """Return the seconds that a step's encoding takes from its backbone, where each device carries both.

    All ranks wait in each step for the one whose device encodes most. Jobs share a device evenly, so in a step no
    encoder takes more of it than the rank does; but a mean device's part has to be done in any case.
    work_s: seconds of the step in which the backbone leaves a mean device no time (``Surrogate.busy_s``). slowdown: of
    both while they compute at once.
    """
    mean = fullest = 0.0
    for each, chosen in zip(encoded, candidate.encoders.values(), strict=True):
        replicas = replicas_of(chosen, packed)
        mean += float(each.seconds.sum()) / replicas * chosen.degrees.world_size / candidate.backbone.devices
        fullest += min(each.fullest_s(replicas), work_s)
    encode = max(mean, fullest)
    return float(encoding_adds_s(np.array(encode), np.array(work_s), slowdown))


def encoded_steps(
    request: Request, surrogate: Surrogate, candidate: ModeCandidate, packed: PackedBatches, name: str
) -> list[EncodedStep]:
    """Return one encoder's batches of each step, cut from the order in which the backbone needs the samples."""
    chosen = candidate.encoders[name]
    num_images, num_patches = request.workload.images[name]
    replicas = replicas_of(chosen, packed)
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
        found.append(EncodedStep(durations.astype(np.float64), needed))
    return found


def _batch_numbers(patches: IntArray, limit: int) -> IntArray:
    """Return the number of each sample's encode batch, ``[N]``, ascending from 0 without gaps.

    A run fills a batch until the next sample exceeds the limit; here one ends wherever the sum passes a multiple of it.
    """
    if not len(patches):
        return np.zeros(0, dtype=np.int64)
    passed = (np.cumsum(patches) - 1) // limit
    return np.concatenate([[0], np.cumsum(np.diff(passed) > 0)]).astype(np.int64)


def replicas_of(encoder: Candidate, packed: PackedBatches) -> int:
    """Return the replicas of an encoder for the packed share of a batch."""
    return max(1, round(encoder.degrees.dp * packed.share))


def _worth_tokens(request: Request) -> FloatArray:
    """Tokens of the data's mix that have as many FLOPs in backbone and connector as each sample, ``[S]``."""
    flops = request.workload.flops(request.model)
    worth = flops.backbone + flops.connector
    return worth * (request.workload.tokens_per_sample / float(worth.mean()))


def _repeated(candidate: Candidate, count: int) -> CandidateColumns:
    """Return one configuration as so many."""
    return columns_of(candidate)[np.zeros(count, dtype=np.int64)]
