"""The training settings that a configuration gives."""

from __future__ import annotations

from typing import Literal

from flowtrain.config.model import Checkpointing as Word
from flowtrain.config.run import RunConfig
from flowtrain.costs.training_setup import CPU_PROBABILITIES, Checkpointing, TrainingSetup


def configured_setup(config: RunConfig, *, on_cpu: bool) -> TrainingSetup:
    """Return them with a dp and tp of 1, and with reductions once a step where the configuration leaves them open.

    It counts open sharding as ``full``, which takes least memory and most communication, and adaptive recomputation as
    ``full``, which takes least memory and most time.
    """
    backbone, encoder = config.backbone, next(iter(config.encoders.values()))
    fastest: Literal["sdpa", "flash_attn"] = "sdpa" if on_cpu else "flash_attn"
    return TrainingSetup(
        dtype=config.model.dtype,
        sharding="full" if backbone.sharding == "auto" else backbone.sharding,
        shard_size=backbone.hybrid_shard_size,
        gradient_reduction="step" if backbone.gradient_reduction == "auto" else backbone.gradient_reduction,
        sequence_parallel=backbone.sequence_parallel,
        activation_checkpointing=_decided(backbone.activation_checkpointing),
        checkpoint_every=backbone.checkpoint_every,
        encoder_checkpointing=_decided(encoder.activation_checkpointing) if encoder.activation_checkpointing else None,
        optimizer=config.training.optimizer,
        attention=fastest if backbone.attention == "auto" else backbone.attention,
        probabilities_at_once=CPU_PROBABILITIES if on_cpu else None,
    )


def _decided(words: Word | tuple[str, ...]) -> Checkpointing:
    return "full" if words == "adaptive" else words
