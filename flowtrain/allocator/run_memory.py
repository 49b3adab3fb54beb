"""The predicted memory of a run with its configured degrees, in every mode."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from flowtrain.allocator.memory import microbatch_size, microbatches_of_a_replica
from flowtrain.config.run import RunConfig
from flowtrain.costs.configured_setup import configured_setup
from flowtrain.costs.memory import StepMemory, encoder_peak_nbytes
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.costs.training_setup import MicrobatchSize, ReductionName, TrainingSetup
from flowtrain.costs.workload import Workload
from flowtrain.pipeline.configured import configured_partition
from flowtrain.pipeline.partition import Partition
from flowtrain.pipeline.rank_chunks import memory_of_rank, rank_chunks


@dataclass(frozen=True, slots=True)
class RunMemory:
    """Bytes on the devices of a run."""

    ranks: tuple[StepMemory, ...]
    """By pipeline rank; the same for every replica and every rank of its tensor parallel group."""
    encoders: Mapping[str, int]
    """Peak of each actor of an encoder, by encoder; empty in modes without encoder actors."""
    gradient_reduction: ReductionName
    """The one that is counted; ``auto`` counts as once a step, which takes most, and ``sharding: auto`` as ``full``."""

    @property
    def fullest(self) -> StepMemory:
        """The memory of the pipeline rank with the highest peak."""
        return max(self.ranks, key=lambda memory: memory.peak)

    @property
    def device_nbytes(self) -> int:
        """Peak of the fullest device if encoder actors share the backbone's devices, as in ``mode: colocated``."""
        return self.fullest.peak + sum(self.encoders.values())


def memory_of_run(config: RunConfig, model: ModelSpec, workload: Workload, *, on_cpu: bool = False) -> RunMemory:
    """Return the predicted memory of a run; pure, as all of the cost model.

    workload: of the run's samples (``controller.planning.planned_run.workload_of``). A microbatch is full; shares of
    images and of tokens with loss are the data's means, but images inside a pipeline's encoder are those of a
    microbatch of the sample with most. on_cpu: ranks have no accelerator. Raises ConfigError if the layers cannot be
    cut as the configuration asks.
    """
    backbone = config.backbone
    dp, pp = backbone.data_parallel_size, backbone.pipeline_parallel_size
    num_microbatches = microbatches_of_a_replica(workload, dp)
    setup = replace(
        configured_setup(config, on_cpu=on_cpu),
        dp=dp,
        tp=backbone.tensor_parallel_size,
        accumulates=num_microbatches > 1,
    )
    if dp == 1:
        setup = replace(setup, gradient_reduction="step")
    partition, size = configured_partition(config, model, pp), _microbatch_size(config, model, workload)
    ranks = memory_of_ranks(model, partition, setup, size, num_microbatches)
    return RunMemory(ranks, _encoder_peaks(config, model), setup.gradient_reduction)


def memory_of_ranks(
    model: ModelSpec, partition: Partition, setup: TrainingSetup, size: MicrobatchSize, num_microbatches: int
) -> tuple[StepMemory, ...]:
    """Return the predicted memory of each pipeline rank. num_microbatches: of a step on each replica."""
    held = (rank_chunks(partition, rank, num_microbatches) for rank in range(partition.pp_size))
    return tuple([memory_of_rank(model, each, setup, size) for each in held])


def monolithic_size(model: ModelSpec, workload: Workload) -> MicrobatchSize:
    """Return the size of a full microbatch with as many images as the densest sample has."""
    size, (name, spec) = microbatch_size(workload), next(iter(model.encoders.items()))
    num_images, num_patches = workload.images[name]
    tokens = num_patches + spec.num_prefix_tokens * num_images
    densest = float((tokens / workload.lengths).max())
    return replace(size, num_tower_tokens=math.ceil(densest * size.num_tokens))


def _encoder_peaks(config: RunConfig, model: ModelSpec) -> dict[str, int]:
    if not config.has_encoder_actors:
        return {}
    return {
        name: encoder_peak_nbytes(
            model.encoders[name],
            encoder.tensor_parallel_size,
            max_batch_patches=encoder.max_batch_patches,
            dtype_nbytes=configured_setup(config, on_cpu=False).dtype_nbytes,
        )
        for name, encoder in config.encoders.items()
    }


def _microbatch_size(config: RunConfig, model: ModelSpec, workload: Workload) -> MicrobatchSize:
    size = microbatch_size(workload)
    if config.mode == "llm_only":
        return replace(size, num_rows=0)
    return monolithic_size(model, workload) if config.mode == "monolithic" else size
