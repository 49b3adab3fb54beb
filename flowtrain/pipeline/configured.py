"""The partition that a configuration and a model give."""

from __future__ import annotations

from flowtrain.config.model import BackboneConfig
from flowtrain.config.run import RunConfig
from flowtrain.costs.model_spec import ModelSpec, TransformerSpec, VisionSpec
from flowtrain.pipeline.actions import MemoryKind, MemoryStrategy, StageMemory, StageModule
from flowtrain.pipeline.partition import EncoderSplit, Partition, build_partition

VISION_SHARE = 0.5
"""Share of vision tokens in a microbatch, by which layers are balanced where ``pipeline.partition`` is not given."""


def configured_partition(config: RunConfig, model: ModelSpec, pp_size: int) -> Partition:
    """Return the partition of a run; the same wherever it is asked for. Raises ConfigError if layers cannot be cut."""
    pipeline = config.pipeline
    encoder = None
    if config.mode == "monolithic":
        name, spec = next(iter(model.encoders.items()))
        is_trained = config.encoders[name].trainable
        cost = encoder_layer_cost(spec, model.backbone, is_trained, "backbone" in config.model.freeze)
        encoder = EncoderSplit(spec.num_layers, pipeline.encoder_layers, cost, is_trained)
    return build_partition(
        model.backbone.num_layers, pp_size, pipeline.chunks, counts=pipeline.partition, encoder=encoder
    )


def encoder_layer_cost(
    encoder: VisionSpec, backbone: TransformerSpec, is_trained: bool, backbone_is_frozen: bool
) -> float:
    """Return the expected time of an encoder layer over that of a decoder layer, by their matrix products.

    A frozen encoder runs forward only; a frozen backbone computes no gradients of weights.
    """
    encoder_passes, backbone_passes = 3 if is_trained else 1, 2 if backbone_is_frozen else 3
    encoder_flops = VISION_SHARE * encoder_passes * encoder.layer_matmul_parameters
    return encoder_flops / (backbone_passes * backbone.layer_matmul_parameters)


def configured_memory(config: RunConfig, partition: Partition) -> dict[tuple[StageModule, int], StageMemory]:
    """Return the memory strategy of every (module, stage)."""
    strategy = configured_strategy(config.backbone)
    return {
        (stage.module, stage.index): strategy if stage.has_backward else MemoryStrategy.KEEP
        for stage in partition.stages
    }


def configured_strategy(config: BackboneConfig) -> MemoryStrategy:
    """Return the strategy that ``backbone.activation_checkpointing`` stands for."""
    return {
        "none": MemoryStrategy.KEEP,
        "full": MemoryStrategy.RECOMPUTE,
        "selective": MemoryStrategy.SELECTIVE,
        "every_n": MemoryStrategy(MemoryKind.RECOMPUTE, every=config.checkpoint_every),
        "offload": MemoryStrategy.OFFLOAD,
    }[config.activation_checkpointing]
