"""The partition and the memory strategies that a configuration and a model give."""

from __future__ import annotations

from flowtrain.config.model import BackboneConfig, LayerCheckpointing
from flowtrain.config.run import RunConfig
from flowtrain.costs.model_spec import ModelSpec, TransformerSpec, VisionSpec
from flowtrain.errors import ConfigError, FaultCode
from flowtrain.pipeline.actions import MemoryKind, MemoryStrategy, StageMemory, StageModule, stage_memory
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
        model.backbone.num_layers,
        pp_size,
        pipeline.chunks,
        counts=pipeline.partition,
        encoder=encoder,
        first_layers=model.backbone.first_layers,
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


_KINDS: dict[LayerCheckpointing, MemoryKind] = {
    "none": MemoryKind.KEEP,
    "full": MemoryKind.RECOMPUTE,
    "selective": MemoryKind.SELECTIVE,
    "offload": MemoryKind.OFFLOAD,
}


def configured_memory(config: RunConfig, partition: Partition) -> dict[tuple[StageModule, int], StageMemory]:
    """Return the memory strategy of every (module, stage) that ``backbone.activation_checkpointing`` stands for.

    A word is that of trained encoder layers too; with a list they keep all. Raises ConfigError if a list has not one
    word for each decoder layer.
    """
    words, uniform = config.backbone.activation_checkpointing, configured_strategy(config.backbone)
    strategies: dict[tuple[StageModule, int], StageMemory] = {
        (stage.module, stage.index): uniform if stage.has_backward else MemoryStrategy.KEEP
        for stage in partition.stages
    }
    if isinstance(words, str):
        return strategies
    backbone = partition.of_module(StageModule.BACKBONE)
    num_layers = sum(len(stage.layers) for stage in backbone)
    if len(words) != num_layers:
        raise ConfigError.of(
            "backbone.activation_checkpointing",
            FaultCode.VALUE,
            f"backbone.activation_checkpointing lists {len(words)} layers, and the backbone has {num_layers}; give one "
            "word for each decoder layer, or one word for all",
        )
    for stage in backbone:
        strategies[stage.module, stage.index] = stage_memory([_KINDS[words[layer]] for layer in stage.layers])
    return strategies


def configured_strategy(config: BackboneConfig) -> MemoryStrategy:
    """Return the strategy that a word of ``backbone.activation_checkpointing`` gives to all layers; KEEP for a list."""
    word = config.activation_checkpointing
    if word == "every_n":
        return MemoryStrategy(MemoryKind.RECOMPUTE, every=config.checkpoint_every)
    return MemoryStrategy(_KINDS[word]) if isinstance(word, str) else MemoryStrategy.KEEP
