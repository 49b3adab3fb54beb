"""The work of an arrangement's microbatches, as the simulator takes it, and what each slot of them takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flowtrain.costs.action_times import StageWork
from flowtrain.costs.flops import FloatArray, IntArray
from flowtrain.costs.microbatches import MicrobatchColumns, ragged_squares
from flowtrain.pipeline.actions import StageModule
from flowtrain.pipeline.partition import Partition
from flowtrain.scheduler.packing.base import Bins
from flowtrain.scheduler.sample_sizes import SampleSizes
from flowtrain.scheduler.step_planner import concatenated
from flowtrain.simulator.step import StepSimulator, stage_work


def works_of(sizes: SampleSizes, bins: Bins, slots: IntArray, encoder: str) -> MicrobatchColumns:
    """Return the microbatches of all replicas, one replica after another, each in the order of its slots.

    slots: bin numbers, ``[num_slots, dp_size]``. encoder: whose images the pipeline's ranks encode; empty for none.
    A sample's patches are split evenly over its images.
    """
    order, ends = concatenated(bins.members, bins.offsets, slots.T.reshape(-1))
    count = slots.size
    number = np.repeat(np.arange(count), np.diff(ends, prepend=0))

    def summed(values: IntArray | FloatArray) -> FloatArray:
        return np.bincount(number, values[order], count).astype(np.float64)

    patches, num_images = np.zeros(0, dtype=np.int64), np.zeros(count, dtype=np.int64)
    if encoder:
        part = sizes.parts[encoder]
        images = part.images[order]
        patches = np.repeat(part.patches[order] // np.maximum(images, 1), images)
        num_images = summed(part.images).astype(np.int64)
    return MicrobatchColumns(
        summed(sizes.tokens),
        summed(sizes.tokens**2),
        summed(ragged_squares(sizes.tokens)),
        summed(sizes.vision_tokens),
        summed(sizes.target_tokens),
        patches,
        num_images,
    )


@dataclass(frozen=True, slots=True, eq=False)
class SlotTimes:
    """Seconds of each slot; the replicas of a slot run side by side, and the slowest counts."""

    forward: FloatArray
    """On each pipeline rank, ``[pp, K]``, without ``encode``."""
    backward: FloatArray
    """``[pp, K]``."""
    encode: FloatArray
    """Of the images on the first rank, where they may be encoded ahead; ``[K]``."""
    moved: FloatArray
    """Of a transfer from one rank to the next, ``[K]``."""

    @property
    def latency(self) -> FloatArray:
        """All that the ranks compute for a slot, ``[K]``."""
        return self.forward.sum(axis=0) + self.backward.sum(axis=0) + self.encode


def slot_times(simulator: StepSimulator, works: MicrobatchColumns, dp_size: int) -> SlotTimes:
    """Return the times of slots; collectives that computing does not hide are left out."""
    partition, count = simulator.partition, len(works) // dp_size
    forward, backward = np.zeros((2, partition.pp_size, count))
    encode, apart = np.zeros(count), encodes_apart(partition)
    known: dict[StageWork, tuple[FloatArray, FloatArray]] = {}
    for stage in partition.stages:
        work = stage_work(partition, stage, simulator.encoder)
        if work not in known:
            known[work] = simulator.times.passes_s(work, works)
        forward_s, backward_s = (each.reshape(dp_size, count).max(axis=0) for each in known[work])
        if apart and stage.module is StageModule.ENCODER:
            encode = forward_s
            continue
        forward[stage.rank] += forward_s
        if stage.has_backward:
            backward[stage.rank] += backward_s
    moved = simulator.times.token_transfer_s * works.num_tokens.reshape(dp_size, count).max(axis=0)
    return SlotTimes(forward, backward, encode, moved)


def encodes_apart(partition: Partition) -> bool:
    """Whether the first rank alone has a whole frozen encoder, in a pipeline with one segment."""
    encoder = partition.of_module(StageModule.ENCODER)
    return len(encoder) == 1 and not encoder[0].has_backward and partition.num_segments == 1
