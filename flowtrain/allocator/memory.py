"""Whether a configuration fits a device: a module's share of memory, and the backbone's peak under its schedule."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

from flowtrain.allocator.slices import ONE_EACH, Slices, layers_of_ranks
from flowtrain.costs.cluster import DeviceType
from flowtrain.costs.memory import USABLE_SHARE, StepMemory, predict_step_memory
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.costs.training_setup import Checkpointing, MicrobatchSize, TrainingSetup
from flowtrain.costs.workload import Workload
from flowtrain.pipeline.rank_chunks import rank_chunks
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
    model: ModelSpec, workload: Workload, setup: TrainingSetup, degrees: Degrees, slices: Slices = ONE_EACH
) -> StepMemory:
    """Return the predicted memory of the fullest rank under 1F1B, interleaved if ranks hold several chunks.

    setup: its ``dp``, ``tp`` and ``accumulates`` are ignored.
    """
    num_microbatches = microbatches_of_a_replica(workload, degrees.dp)
    partition = slices.partition(model.backbone.num_layers, degrees.pp)
    at = replace(setup, dp=degrees.dp, tp=degrees.tp, accumulates=num_microbatches > 1)
    size = microbatch_size(workload)
    ranks = _ranks_to_compare(slices, model.backbone.num_layers, degrees.pp, setup.activation_checkpointing)
    each = (
        predict_step_memory(
            model.backbone, model.connector, rank_chunks(partition, rank, num_microbatches).backbone, at, size
        )
        for rank in ranks
    )
    return max(each, key=lambda memory: memory.peak)


def microbatches_of_a_replica(workload: Workload, dp: int) -> int:
    """Return the microbatches of a step on each replica."""
    per_replica = workload.tokens_per_step / dp / (workload.microbatch_tokens * workload.fill)
    return max(1, math.ceil(per_replica - 1e-9))


def microbatch_size(workload: Workload) -> MicrobatchSize:
    """Return the size of a full microbatch with the data's mean shares of images and of tokens with loss."""
    tokens = workload.microbatch_tokens
    return MicrobatchSize(tokens, math.ceil(tokens * workload.target_share), math.ceil(tokens * workload.vision_share))


@lru_cache(maxsize=4096)
def _ranks_to_compare(slices: Slices, num_layers: int, pp: int, checkpointing: Checkpointing) -> tuple[int, ...]:
    """Ranks of which one is the fullest: of those with the same layers the first, which keeps most, and the last.

    The last has the loss.
    """
    words = checkpointing if not isinstance(checkpointing, str) else None
    first: dict[tuple[object, ...], int] = {}
    for rank, layers in enumerate(layers_of_ranks(slices, num_layers, pp)):
        same = (len(layers), *(sorted(Counter(words[layer] for layer in layers).items()) if words else ()))
        first.setdefault(same, rank)
    return tuple(sorted({0, pp - 1, *first.values()}))
