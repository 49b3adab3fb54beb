"""What data parallel ranks decide by their memory: when they sum gradients, and what they shard."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist

from flowtrain.config.modes import colocated_shares
from flowtrain.config.run import RunConfig
from flowtrain.costs.configured_setup import configured_setup
from flowtrain.costs.encoder_memory import EncoderShare
from flowtrain.costs.memory import USABLE_SHARE, predict_step_memory
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.costs.training_setup import MicrobatchSize
from flowtrain.models.families.base import Family
from flowtrain.pipeline.configured import configured_partition
from flowtrain.pipeline.rank_chunks import rank_chunks
from flowtrain.training.mesh import BackboneGroup
from flowtrain.training.profile_device import memory_nbytes
from flowtrain.types.plan import Degrees, GradientReduction, Sharding

AS_SET = "as set in config.yaml"
"""By the configuration or by a plan: the run's file has either."""


def decide_reduction(config: RunConfig, family: Family, group: BackboneGroup) -> GradientReduction:
    """Return the configured gradient reduction, or decide about ``auto``; collective, with one answer on all ranks."""
    return _reduction(config, group.degrees, lambda: _needs(config, family, group))


def foreseen_reduction(
    config: RunConfig, family: Family, degrees: Degrees, memory_nbytes: int, shard_size: int
) -> GradientReduction:
    """As ``decide_reduction``, for accelerators with so much memory; no ranks are asked."""
    return _reduction(config, degrees, lambda: _foreseen(config, family, degrees, memory_nbytes, shard_size))


def foreseen_sharding(
    config: RunConfig, family: Family, degrees: Degrees, memory_nbytes: int, shard_size: int
) -> Sharding:
    """As ``decide_sharding``, for accelerators with so much memory; no ranks are asked."""
    return _sharding(config, degrees, lambda whole: _foreseen(whole, family, degrees, memory_nbytes, shard_size))


def _reduction(config: RunConfig, degrees: Degrees, needs: Callable[[], list[RankNeed]]) -> GradientReduction:
    configured = config.backbone.gradient_reduction
    if configured != "auto":
        return GradientReduction(configured, AS_SET)
    if degrees.dp == 1:
        return GradientReduction("step", "auto: there is one replica")
    return choose_reduction(needs())


def decide_sharding(config: RunConfig, family: Family, group: BackboneGroup) -> Sharding:
    """Return the configured sharding, or decide about ``auto``; collective, with one answer on all ranks.

    Whole parameters that fit beside whole gradients leave a reduction of ``auto`` at once a step.
    """
    return _sharding(config, group.degrees, lambda whole: _needs(whole, family, group))


def _sharding(config: RunConfig, degrees: Degrees, needs: Callable[[RunConfig], list[RankNeed]]) -> Sharding:
    configured = config.backbone.sharding
    if configured != "auto":
        return Sharding(configured, AS_SET)
    if degrees.dp == 1:
        return Sharding("full", "auto: there is one replica, which has no shards")
    whole = config.model_copy(update={"backbone": config.backbone.model_copy(update={"sharding": "gradients"})})
    return choose_sharding(needs(whole))


def with_choices(
    config: RunConfig, reduction: Literal["microbatch", "step"], sharding: Literal["full", "gradients", "hybrid"]
) -> RunConfig:
    """Return the configuration with what was decided."""
    decided = {"gradient_reduction": reduction, "sharding": sharding}
    return config.model_copy(update={"backbone": config.backbone.model_copy(update=decided)})


def _needs(config: RunConfig, family: Family, group: BackboneGroup) -> list[RankNeed]:
    """Of all ranks, by rank; collective."""
    on_cpu = group.device.type == "cpu"
    peak = predicted_peak_nbytes(
        config,
        family.model_spec,
        group.degrees,
        group.pp_rank,
        shard_size=group.shard_size,
        on_cpu=on_cpu,
        tower_tokens_per_row=_tower_tokens_per_row(config, family),
    )
    share = colocated_shares(config)[1] if config.mode == "colocated" else config.backbone.num_devices
    share = 1.0 if on_cpu else share
    need = RankNeed(peak, int(memory_nbytes(group.device) * share * USABLE_SHARE))
    found = torch.tensor([need.peak_nbytes, need.usable_nbytes])
    of_all = [torch.empty_like(found) for _ in range(group.world_size)]
    dist.all_gather(of_all, found, group=group.process_group)
    return [RankNeed(*row.tolist()) for row in of_all]


def _foreseen(
    config: RunConfig, family: Family, degrees: Degrees, memory_nbytes: int, shard_size: int
) -> list[RankNeed]:
    """Of a rank of each pipeline stage."""
    share = colocated_shares(config)[1] if config.mode == "colocated" else config.backbone.num_devices
    usable, model, tokens = int(memory_nbytes * share * USABLE_SHARE), family.model_spec, _tower_tokens_per_row
    return [
        RankNeed(
            predicted_peak_nbytes(
                config,
                model,
                degrees,
                pp_rank,
                shard_size=shard_size,
                on_cpu=False,
                tower_tokens_per_row=tokens(config, family),
            ),
            usable,
        )
        for pp_rank in range(degrees.pp)
    ]


@dataclass(frozen=True, slots=True)
class RankNeed:
    """Memory of one rank, in bytes."""

    peak_nbytes: int
    """Predicted peak with the preferred choice."""
    usable_nbytes: int
    """Of its device."""


def choose_reduction(ranks: Sequence[RankNeed]) -> GradientReduction:
    """Choose ``step``, which communicates less, if it fits the device of every rank; else ``microbatch``."""
    fits, reason = _fits(ranks, "once a step")
    return GradientReduction("step" if fits else "microbatch", reason)


def choose_sharding(ranks: Sequence[RankNeed]) -> Sharding:
    """Choose ``gradients``, which gathers once a step, if it fits the device of every rank; else ``full``."""
    fits, reason = _fits(ranks, "whole parameters")
    return Sharding("gradients" if fits else "full", reason)


def _fits(ranks: Sequence[RankNeed], preferred: str) -> tuple[bool, str]:
    fullest = min(ranks, key=lambda rank: rank.usable_nbytes - rank.peak_nbytes)
    peak, usable = (f"{nbytes / 2**30:.1f} GiB" for nbytes in (fullest.peak_nbytes, fullest.usable_nbytes))
    reason = f"auto: {preferred} would take {peak} on the fullest rank, of {usable} usable"
    return fullest.peak_nbytes <= fullest.usable_nbytes, reason


def predicted_peak_nbytes(
    config: RunConfig,
    model: ModelSpec,
    degrees: Degrees,
    pp_rank: int,
    *,
    shard_size: int,
    on_cpu: bool,
    tower_tokens_per_row: float = 1.0,
) -> int:
    """Return the predicted peak of a pipeline rank with the largest possible microbatch.

    All its tokens then carry loss, or all are images'. ``auto`` counts as a reduction once a step, and as full
    sharding. shard_size: data parallel ranks that share one set of shards. tower_tokens_per_row: tokens inside an
    encoder for each feature row.
    """
    tokens = config.scheduler.microbatch_tokens
    # An interleaved schedule keeps most in flight with this many microbatches; 1F1B with these or more.
    held = rank_chunks(configured_partition(config, model, degrees.pp), pp_rank, 2 * degrees.pp - 1)
    setup = replace(configured_setup(config, on_cpu=on_cpu), dp=degrees.dp, tp=degrees.tp, shard_size=shard_size)
    size = MicrobatchSize(tokens, tokens, tokens, math.ceil(tokens * tower_tokens_per_row))
    encoder = EncoderShare(next(iter(model.encoders.values())), held.encoder) if held.encoder else None
    return predict_step_memory(model.backbone, model.connector, held.backbone, setup, size, encoder).peak


def _tower_tokens_per_row(config: RunConfig, family: Family) -> float:
    """The most, which the smallest image has; 1 without encoder layers in the pipeline."""
    if config.mode != "monolithic":
        return 1.0
    name = family.encoder_names[0]
    layout, prefix = family.image_layout(name, 1, 1), family.model_spec.encoders[name].num_prefix_tokens
    return (layout.num_patches + prefix * layout.num_tiles) / max(1, layout.num_rows)
