"""Whether a configuration fits a device: a module's share of memory, and the backbone's peak under its schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from flowtrain.costs.cluster import DeviceType
from flowtrain.costs.memory import USABLE_SHARE, StepMemory, predict_step_memory
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.costs.training_setup import Chunk, MicrobatchSize, TrainingSetup
from flowtrain.costs.workload import Workload
from flowtrain.pipeline.partition import build_partition, split_layers
from flowtrain.pipeline.schedules.one_f_one_b import in_flight_by_chunk
from flowtrain.types.plan import Degrees


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The part of a device's memory that a module may use."""

    usable: float = USABLE_SHARE
    pool_nbytes: int = 0
    """Bytes of an encoder's device that belong to the memory pool."""

    def module_nbytes(self, device_type: DeviceType, *, is_encoder: bool) -> int:
        """Return the bytes that a module may use on each device."""
        return int(device_type.memory_nbytes * self.usable) - (self.pool_nbytes if is_encoder else 0)


def backbone_memory(
    model: ModelSpec, workload: Workload, setup: TrainingSetup, degrees: Degrees, chunks_per_rank: int = 1
) -> StepMemory:
    """Return the predicted memory of the fullest rank under 1F1B, interleaved if ranks hold several chunks.

    setup: its ``dp``, ``tp`` and ``accumulates`` are ignored.
    """
    each = _memory_of_ranks(model, workload, setup, degrees, chunks_per_rank)
    return max(each, key=lambda memory: memory.peak)


def _memory_of_ranks(
    model: ModelSpec, workload: Workload, setup: TrainingSetup, degrees: Degrees, chunks_per_rank: int
) -> Iterator[StepMemory]:
    """Of the first rank, which keeps most activations, the last, which has the loss, and one with most layers."""
    per_rank = workload.tokens_per_step / degrees.dp / (workload.microbatch_tokens * workload.fill)
    num_microbatches = max(1, math.ceil(per_rank - 1e-9))
    pp, num_stages = degrees.pp, degrees.pp * chunks_per_rank
    lengths = [len(stage) for stage in split_layers(model.backbone.num_layers, num_stages)]
    partition = build_partition(model.backbone.num_layers, pp, chunks_per_rank)
    layers = [sum(lengths[rank::pp]) for rank in range(pp)]
    tokens = workload.microbatch_tokens
    size = MicrobatchSize(tokens, math.ceil(tokens * workload.target_share), math.ceil(tokens * workload.vision_share))
    at = replace(setup, dp=degrees.dp, tp=degrees.tp, accumulates=num_microbatches > 1)
    for rank in sorted({0, layers.index(max(layers)), pp - 1}):
        held = tuple(
            Chunk(lengths[stage], stage == 0, stage == num_stages - 1, in_flight)
            for stage, in_flight in zip(
                range(rank, num_stages, pp),
                in_flight_by_chunk(partition, rank, num_microbatches),
                strict=True,
            )
        )
        yield predict_step_memory(model.backbone, model.connector, held, at, size)
