"""When data parallel ranks sum gradients: after each microbatch, or once a step if whole gradients fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from flowtrain.config.run import RunConfig
from flowtrain.costs.hf_config import from_hf_text_config
from flowtrain.costs.memory import USABLE_SHARE, predict_step_memory
from flowtrain.costs.model_spec import ConnectorSpec, TransformerSpec
from flowtrain.costs.training_setup import Chunk, MicrobatchSize, TrainingSetup
from flowtrain.models.families.base import Family
from flowtrain.pipeline.partition import build_partition, split_layers
from flowtrain.pipeline.schedules.one_f_one_b import in_flight_by_chunk
from flowtrain.training.mesh import BackboneGroup
from flowtrain.training.profile_device import memory_nbytes
from flowtrain.types.plan import Degrees, GradientReduction


def decide_reduction(config: RunConfig, family: Family, group: BackboneGroup) -> GradientReduction:
    """Return the configured gradient reduction, or decide about ``auto``; collective, with one answer on all ranks."""
    configured = config.backbone.gradient_reduction
    if configured != "auto":
        return GradientReduction(configured, "as configured")
    if group.degrees.dp == 1:
        return GradientReduction("step", "auto: there is one replica")
    spec = from_hf_text_config(family.text_config.to_dict())
    connector = ConnectorSpec(family.feature_dim(family.encoder_names[0]), spec.hidden_size, spec.hidden_size)
    on_cpu = group.device.type == "cpu"
    peak = predicted_peak_nbytes(
        config, spec, connector, group.degrees, group.pp_rank, shard_size=group.shard_size, on_cpu=on_cpu
    )
    share = 1.0 if on_cpu else config.backbone.num_devices
    need = RankNeed(peak, int(memory_nbytes(group.device) * share * USABLE_SHARE))
    found = torch.tensor([need.peak_nbytes, need.usable_nbytes])
    of_all = [torch.empty_like(found) for _ in range(group.world_size)]
    dist.all_gather(of_all, found, group=group.process_group)
    return choose_reduction([RankNeed(*row.tolist()) for row in of_all])


def with_reduction(config: RunConfig, name: Literal["microbatch", "step"]) -> RunConfig:
    """Return the configuration with a gradient reduction."""
    return config.model_copy(update={"backbone": config.backbone.model_copy(update={"gradient_reduction": name})})


@dataclass(frozen=True, slots=True)
class RankNeed:
    """Memory of one rank, in bytes."""

    peak_nbytes: int
    """Predicted peak with a reduction once a step."""
    usable_nbytes: int
    """Of its device."""


def choose_reduction(ranks: Sequence[RankNeed]) -> GradientReduction:
    """Choose ``step``, which communicates less, if it fits the device of every rank; else ``microbatch``."""
    fullest = min(ranks, key=lambda rank: rank.usable_nbytes - rank.peak_nbytes)
    peak, usable = (f"{nbytes / 2**30:.1f} GiB" for nbytes in (fullest.peak_nbytes, fullest.usable_nbytes))
    reason = f"auto: once a step would take {peak} on the fullest rank, of {usable} usable"
    return GradientReduction("step" if fullest.peak_nbytes <= fullest.usable_nbytes else "microbatch", reason)


def predicted_peak_nbytes(
    config: RunConfig,
    spec: TransformerSpec,
    connector: ConnectorSpec,
    degrees: Degrees,
    pp_rank: int,
    *,
    shard_size: int,
    on_cpu: bool,
) -> int:
    """Return the predicted peak of a pipeline rank that reduces once a step, with the largest possible microbatch.

    All its tokens then carry loss, or all are images'. shard_size: data parallel ranks that share one set of shards.
    """
    backbone, pipeline = config.backbone, config.pipeline
    tokens = config.scheduler.microbatch_tokens
    num_stages = degrees.pp * pipeline.chunks
    lengths = [len(stage) for stage in split_layers(spec.num_layers, num_stages)]
    partition = build_partition(spec.num_layers, degrees.pp, pipeline.chunks)
    # An interleaved schedule keeps most in flight with this many microbatches; 1F1B with these or more.
    in_flight = in_flight_by_chunk(partition, pp_rank, 2 * degrees.pp - 1)
    chunks = tuple(
        Chunk(lengths[stage], stage == 0, stage == num_stages - 1, count)
        for stage, count in zip(range(pp_rank, num_stages, degrees.pp), in_flight, strict=True)
    )
    fastest: Literal["sdpa", "flash_attn"] = "sdpa" if on_cpu else "flash_attn"
    setup = TrainingSetup(
        dp=degrees.dp,
        tp=degrees.tp,
        dtype=config.model.dtype,
        sharding=backbone.sharding,
        shard_size=shard_size,
        gradient_reduction="step",
        sequence_parallel=backbone.sequence_parallel,
        activation_checkpointing=backbone.activation_checkpointing,
        checkpoint_every=backbone.checkpoint_every,
        optimizer=config.training.optimizer,
        attention=fastest if backbone.attention == "auto" else backbone.attention,
    )
    return predict_step_memory(spec, connector, chunks, setup, MicrobatchSize(tokens, tokens, tokens)).peak
