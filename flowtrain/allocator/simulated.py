"""Configurations timed by the simulator: the action lists of a run, over packed batches of the real lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from flowtrain.allocator import monolithic
from flowtrain.allocator.drawn import encoded_steps, replicas_of, shared_encode_s
from flowtrain.allocator.drawn_batches import SIMULATED_BATCHES, DrawnBatches, PackedBatches
from flowtrain.allocator.mode_candidate import ModeCandidate
from flowtrain.allocator.request import Request
from flowtrain.allocator.surrogate import Surrogate
from flowtrain.costs.action_times import ActionTimes, DeviceTimes
from flowtrain.costs.flops import IntArray
from flowtrain.costs.microbatches import MicrobatchColumns, ragged_squares
from flowtrain.costs.profiled_times import CPU
from flowtrain.pipeline.partition import Partition
from flowtrain.pipeline.schedules.build import ScheduleName
from flowtrain.simulator.engine import Timeline
from flowtrain.simulator.run import SimulatedRun, StepWork, simulate
from flowtrain.simulator.step import StepSimulator

DeviceTimesOf = Callable[[Request, str], DeviceTimes]
"""Times of any work on a type of device, with a request's settings."""


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedWork:
    """The work of a configuration's steps, whenever its encoders may begin."""

    simulator: StepSimulator
    steps: tuple[StepWork, ...]


def simulated_run(
    request: Request, candidate: ModeCandidate, batches: DrawnBatches, work: SimulatedWork, *, num_steps: int = 12
) -> SimulatedRun:
    """Return the times of one configuration.

    request: with its settings. work: its own. num_steps: least number of steps; the second half counts.
    """
    packed, steps = batches.packed(request, candidate.backbone.degrees.dp), work.steps
    return simulate(
        work.simulator,
        steps,
        num_steps=-(-num_steps // (2 * len(steps))) * 2 * len(steps),  # each half has each batch as often
        replicas=[replicas_of(each, packed) for each in candidate.encoders.values()],
        lookahead=batches.scheduler.lookahead_steps,
        is_barrier=candidate.mode == "disaggregated",
    )


def simulated_work(
    request: Request,
    surrogate: Surrogate,
    times_of: DeviceTimesOf,
    candidate: ModeCandidate,
    batches: DrawnBatches,
    slowdown: float = 1.0,
) -> SimulatedWork:
    """Return the work of one configuration; arguments are those of ``drawn_rate``."""
    packed = batches.packed(request, candidate.backbone.degrees.dp)
    simulator = step_simulator(request, times_of, candidate)
    encoded = [encoded_steps(request, surrogate, candidate, packed, name) for name in candidate.encoders]
    schedule = schedule_of(request)
    steps: list[StepWork] = []
    ends = packed.slot_ends[:SIMULATED_BATCHES]
    for index, (first, last) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        works = works_of(request, packed, int(first), int(last), has_images=candidate.mode == "monolithic")
        program, works = simulator.folded(schedule, works, packed.dp)
        step = StepWork(program, works, tuple(each[index] for each in encoded))
        if candidate.mode == "colocated":
            step = with_shared_devices(step, simulator, candidate, packed, slowdown)
        steps.append(step)
    return SimulatedWork(simulator, tuple(steps))


def schedule_of(request: Request) -> ScheduleName:
    """Return the schedule of a request's pipeline."""
    return "1f1b" if request.slices.chunks == 1 else "interleaved_1f1b"


def with_shared_devices(
    step: StepWork, simulator: StepSimulator, candidate: ModeCandidate, packed: PackedBatches, slowdown: float
) -> StepWork:
    """Return the step with what each device works for it, where it carries a rank and an encoder."""
    if candidate.backbone.degrees.pp == 1:
        work = simulator.computing_s(step.program, step.works)
    else:  # as ``Surrogate.busy_s``
        seconds, transfers = simulator.durations(step.program, step.works)
        alone = Timeline(step.program, seconds, transfers, buffered=simulator.buffered)
        work = alone.makespan_s + simulator.optimizer_s()
    return replace(
        step, shared_s=work, shared_encode_s=shared_encode_s(candidate, step.encoded, packed, work, slowdown)
    )


def step_simulator(request: Request, times_of: DeviceTimesOf, candidate: ModeCandidate) -> StepSimulator:
    """Return what times steps of a candidate's backbone."""
    backbone = candidate.backbone
    shards = request.num_shards(backbone)
    setup = replace(request.setup, shard_size=shards, gradient_reduction=backbone.gradient_reduction)
    times = replace(times_of(request, backbone.device_type), setup=setup)
    # Groups of shards as in the run, also where only a part of the ranks is packed for.
    actions = ActionTimes(times, backbone.degrees, shards)
    is_buffered = times.device.name == CPU  # gloo copies what is sent, NCCL does not
    return StepSimulator(partition_of(request, candidate), actions, _encoder(request, candidate), is_buffered)


def _encoder(request: Request, candidate: ModeCandidate) -> str:
    return monolithic.encoder_of(request.model)[0] if candidate.mode == "monolithic" else ""


def partition_of(request: Request, candidate: ModeCandidate) -> Partition:
    """Return which layers lie on which stage of the run."""
    pp = candidate.backbone.degrees.pp
    if candidate.mode == "monolithic":
        return monolithic.monolithic_partition(request, pp, candidate.encoder_layers or "first")
    return request.slices.partition(request.model.backbone.num_layers, pp)


def works_of(request: Request, packed: PackedBatches, first: int, last: int, *, has_images: bool) -> MicrobatchColumns:
    """Return the microbatches in slots ``first`` to ``last``, those of a rank after those of the one before."""
    workload = request.workload
    lengths = workload.lengths.astype(np.float64)
    lengths_squared = np.square(lengths), ragged_squares(lengths)
    columns = (lengths, *lengths_squared, workload.vision_lengths, workload.target_lengths)
    tokens, squares, ragged, vision, targets = (packed.sums(each)[first:last].T.reshape(-1) for each in columns)
    none = np.zeros(0, dtype=np.int64), np.zeros(len(tokens), dtype=np.int64)
    images = _images(request, packed, first, last) if has_images else none
    return MicrobatchColumns(tokens, squares, ragged, vision, targets, *images)


def _images(request: Request, packed: PackedBatches, first: int, last: int) -> tuple[IntArray, IntArray]:
    """Patches of each image of the microbatches, and the number of each one's images."""
    num_images, num_patches = request.workload.images[monolithic.encoder_of(request.model)[0]]
    start, end = np.searchsorted(packed.places, [first * packed.dp, last * packed.dp])
    slot, rank = np.divmod(packed.places[start:end] - first * packed.dp, packed.dp)
    number = rank * (last - first) + slot
    order = np.argsort(number, kind="stable")
    samples = packed.samples[start:end][order]
    each = num_images[samples]
    patches = np.repeat(num_patches[samples] // np.maximum(each, 1), each)
    return patches, np.bincount(number[order], each, packed.dp * (last - first)).astype(np.int64)
