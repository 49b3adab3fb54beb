"""What ranks decide by their memory: when they sum gradients, what they shard, which layers they recompute."""

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
from flowtrain.costs.memory import USABLE_SHARE
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.costs.training_setup import MicrobatchSize, TrainingSetup
from flowtrain.models.families.base import Family
from flowtrain.pipeline.actions import StageModule
from flowtrain.pipeline.configured import configured_partition
from flowtrain.pipeline.rank_chunks import memory_of_rank, rank_chunks
from flowtrain.pipeline.recompute import Recomputation, adaptive_recomputation
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


def decide_recomputation(config: RunConfig, family: Family, group: BackboneGroup) -> Recomputation | None:
    """Return what all ranks recompute if ``activation_checkpointing`` is adaptive; collective, the same on all ranks.

    config: with the choices of ``decide_reduction`` and ``decide_sharding``, which count it as ``full``. None: nothing
    is adaptive.
    """
    if not _adaptive_modules(config):
        return None
    usable = [each for (each,) in _gathered([_usable_nbytes(config, group)], group)]
    of_stage: dict[int, int] = {}
    for rank, each in enumerate(usable):
        stage = group.degrees.coordinates(rank)[1]
        of_stage[stage] = min(each, of_stage.get(stage, each))
    stages = [of_stage[stage] for stage in range(group.degrees.pp)]
    return _recomputation(config, family, group.degrees, stages, group.shard_size, on_cpu=group.device.type == "cpu")


def foreseen_recomputation(
    config: RunConfig, family: Family, degrees: Degrees, memory_nbytes: int, shard_size: int
) -> Recomputation | None:
    """As ``decide_recomputation``, for accelerators with so much memory; no ranks are asked."""
    if not _adaptive_modules(config):
        return None
    usable = [_usable(config, memory_nbytes, on_cpu=False)] * degrees.pp
    return _recomputation(config, family, degrees, usable, shard_size, on_cpu=False)


def _recomputation(
    config: RunConfig, family: Family, degrees: Degrees, usable: Sequence[int], shard_size: int, *, on_cpu: bool
) -> Recomputation:
    """usable: of the devices of each pipeline rank, in bytes."""
    model = family.model_spec
    return adaptive_recomputation(
        configured_partition(config, model, degrees.pp),
        model,
        _setup(config, degrees, shard_size, on_cpu=on_cpu),
        _largest(config, _tower_tokens_per_row(config, family)),
        usable,
        adaptive=_adaptive_modules(config),
        num_microbatches=_most_in_flight(degrees),
    )


def _adaptive_modules(config: RunConfig) -> frozenset[StageModule]:
    """Modules whose layers' strategy is chosen; a trained encoder without a word of its own follows the backbone."""
    backbone = config.backbone.activation_checkpointing
    encoder = next(iter(config.encoders.values())).activation_checkpointing
    words = {StageModule.BACKBONE: backbone}
    if config.mode == "monolithic" and config.trains_encoders:
        words[StageModule.ENCODER] = backbone if encoder is None else encoder
    return frozenset(module for module, each in words.items() if each == "adaptive")


def with_recomputation(config: RunConfig, chosen: Recomputation) -> RunConfig:
    """Return the configuration with lists in the place of ``adaptive``."""
    changes: dict[str, object] = {}
    if chosen.backbone is not None:
        words = {"activation_checkpointing": chosen.backbone}
        changes["backbone"] = config.backbone.model_copy(update=words)
    name, encoder = next(iter(config.encoders.items()))
    # With a list of the backbone's, an encoder without words of its own would keep all.
    own = chosen.encoder if chosen.encoder is not None else encoder.activation_checkpointing
    if own is not None:
        changes["encoders"] = {**config.encoders, name: encoder.model_copy(update={"activation_checkpointing": own})}
    return config.model_copy(update=changes)


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
    return [RankNeed(*row) for row in _gathered([peak, _usable_nbytes(config, group)], group)]


def _usable_nbytes(config: RunConfig, group: BackboneGroup) -> int:
    """Of this rank's device; on a CPU, of one core's share of the memory."""
    return _usable(config, memory_nbytes(group.device), on_cpu=group.device.type == "cpu")


def _usable(config: RunConfig, memory_nbytes: int, *, on_cpu: bool) -> int:
    if (given := config.backbone.usable_memory_nbytes) is not None:
        return given
    share = colocated_shares(config)[1] if config.mode == "colocated" else config.backbone.num_devices
    return int(memory_nbytes * (1.0 if on_cpu else share) * USABLE_SHARE)


def _gathered(values: list[int], group: BackboneGroup) -> list[list[int]]:
    """Those of all ranks, by rank; collective."""
    found = torch.tensor(values)
    of_all = [torch.empty_like(found) for _ in range(group.world_size)]
    dist.all_gather(of_all, found, group=group.process_group)
    return [row.tolist() for row in of_all]


def _foreseen(
    config: RunConfig, family: Family, degrees: Degrees, memory_nbytes: int, shard_size: int
) -> list[RankNeed]:
    """Of a rank of each pipeline stage."""
    usable, model, tokens = _usable(config, memory_nbytes, on_cpu=False), family.model_spec, _tower_tokens_per_row
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
    # An interleaved schedule keeps most in flight with this many microbatches; 1F1B with these or more.
    held = rank_chunks(configured_partition(config, model, degrees.pp), pp_rank, _most_in_flight(degrees))
    setup = _setup(config, degrees, shard_size, on_cpu=on_cpu)
    return memory_of_rank(model, held, setup, _largest(config, tower_tokens_per_row)).peak


def _most_in_flight(degrees: Degrees) -> int:
    return 2 * degrees.pp - 1


def _setup(config: RunConfig, degrees: Degrees, shard_size: int, *, on_cpu: bool) -> TrainingSetup:
    return replace(configured_setup(config, on_cpu=on_cpu), dp=degrees.dp, tp=degrees.tp, shard_size=shard_size)


def _largest(config: RunConfig, tower_tokens_per_row: float) -> MicrobatchSize:
    """The largest possible microbatch."""
    tokens = config.scheduler.microbatch_tokens
    return MicrobatchSize(tokens, tokens, tokens, math.ceil(tokens * tower_tokens_per_row))


def _tower_tokens_per_row(config: RunConfig, family: Family) -> float:
    """The most, which the smallest image has; 1 without encoder layers in the pipeline."""
    if config.mode != "monolithic":
        return 1.0
    name = family.encoder_names[0]
    layout, prefix = family.image_layout(name, 1, 1), family.model_spec.encoders[name].num_prefix_tokens
    return (layout.num_patches + prefix * layout.num_tiles) / max(1, layout.num_rows)
