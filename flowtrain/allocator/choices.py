"""The settings of the backbone among which a plan chooses, from a configuration."""

from __future__ import annotations

from itertools import product
from typing import Literal

from flowtrain.config.run import RunConfig
from flowtrain.costs.model_spec import TransformerSpec
from flowtrain.costs.workload import Workload
from flowtrain.types.run_plan import BackboneSettings

_Checkpointing = Literal["none", "selective", "full", "offload"] | None
_Sharding = Literal["full", "gradients", "hybrid"] | None
_CHUNKS = (1, 2, 4)
_GRAIN = 256
"""A microbatch for the longest sample is rounded up to a multiple of so many tokens."""


def backbone_choices(
    config: RunConfig, spec: TransformerSpec, workload: Workload, *, on_cpu: bool = False
) -> tuple[BackboneSettings, ...]:
    """Return the settings that ``config.planner_choices`` frees, as configured first; empty if it frees none of them.

    What the configuration fixes by more than a word is no choice: a list in ``backbone.activation_checkpointing``, the
    chunks of a ``pipeline.partition``, the sharding of a ``backbone.hybrid_shard_size``. A microbatch holds the longest
    sample and ``data.max_seq_len``. on_cpu: devices have no host memory to offload to.
    """
    freed = config.planner_choices - {"gradient_reduction"}
    if not freed:
        return ()
    found = product(
        _microbatch_tokens(config, workload) if "microbatch_tokens" in freed else (config.scheduler.microbatch_tokens,),
        _checkpointing(config, on_cpu) if "activation_checkpointing" in freed else (None,),
        _chunks(config, spec) if "chunks" in freed else (config.pipeline.chunks,),
        _sharding(config) if "sharding" in freed else (None,),
    )
    return tuple(BackboneSettings(*each) for each in found)


def _microbatch_tokens(config: RunConfig, workload: Workload) -> tuple[int, ...]:
    given, longest = config.scheduler.microbatch_tokens, int(workload.lengths.max())
    least = max(config.data.max_seq_len, longest)
    wanted = (given, 2 * given, 4 * given, given // 2, -(-longest // _GRAIN) * _GRAIN)
    return tuple(dict.fromkeys(each for each in wanted if each >= least))


def _checkpointing(config: RunConfig, on_cpu: bool) -> tuple[_Checkpointing, ...]:
    given = config.backbone.activation_checkpointing
    if not isinstance(given, str):
        return (None,)
    words: tuple[_Checkpointing, ...] = (
        ("none", "selective", "full") if on_cpu else ("none", "selective", "full", "offload")
    )
    if given == "every_n" or given == "adaptive":
        return (None, *words)
    return (given, *(word for word in words if word != given))


def _chunks(config: RunConfig, spec: TransformerSpec) -> tuple[int, ...]:
    given = config.pipeline.chunks
    if config.pipeline.counts is not None:
        return (given,)
    return tuple(dict.fromkeys((given, *(each for each in _CHUNKS if each == 1 or 2 * each <= spec.most_stages))))


def _sharding(config: RunConfig) -> tuple[_Sharding, ...]:
    given = config.backbone.sharding
    if config.backbone.hybrid_shard_size is not None:
        return (None,)
    first: _Sharding = "full" if given == "auto" else given
    every: tuple[_Sharding, ...] = ("full", "gradients", "hybrid")
    return (first, *(each for each in every if each != first))
