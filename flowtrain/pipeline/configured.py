"""The partition and the memory strategies that a configuration and a model give."""

from __future__ import annotations

from collections.abc import Mapping

from flowtrain.config.model import BackboneConfig, Checkpointing, LayerCheckpointing
from flowtrain.config.run import RunConfig
from flowtrain.costs.model_spec import ModelSpec, TransformerSpec, VisionSpec
from flowtrain.errors import ConfigError, FaultCode
from flowtrain.pipeline.actions import MemoryKind, MemoryStrategy, StageMemory, StageModule, stage_memory
from flowtrain.pipeline.partition import EncoderSplit, Partition, Stage, build_partition

VISION_SHARE = 0.5
"""Share of vision tokens in a microbatch, by which layers are balanced where ``pipeline.partition`` is not given."""


def configured_partition(config: RunConfig, model: ModelSpec, pp_size: int) -> Partition:
    """Return the partition of a run; the same wherever it is asked for. Raises ConfigError if layers cannot be cut.

    A word in ``pipeline.partition`` counts as None here: a run's start replaces it by numbers (``search.partition``).
    """
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
        counts=pipeline.counts,
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
    """Return the memory strategy of every (module, stage) that ``activation_checkpointing`` stands for.

    A word of the backbone is that of trained encoder layers too, unless they have their own; with a list of the
    backbone's they keep all. ``adaptive`` counts as ``full``: ranks replace it by lists when they start
    (``pipeline.recompute``). Raises ConfigError if a list has not one word for each layer.
    """
    backbone, encoder = config.backbone, _encoder_words(config)
    words: dict[StageModule, _Words] = {
        StageModule.BACKBONE: backbone.activation_checkpointing,
        StageModule.ENCODER: encoder if encoder is not None else _one_word(backbone.activation_checkpointing),
    }
    _check_lists(config, partition, words)
    return {
        (stage.module, stage.index): _stage_memory(words[stage.module], stage, backbone.checkpoint_every)
        for stage in partition.stages
    }


def configured_strategy(config: BackboneConfig) -> MemoryStrategy:
    """Return the strategy that a word of ``backbone.activation_checkpointing`` gives to all layers; KEEP for a list."""
    return _uniform(_one_word(config.activation_checkpointing), config.checkpoint_every)


_Words = Checkpointing | tuple[LayerCheckpointing, ...]


def _encoder_words(config: RunConfig) -> _Words | None:
    """Those of the only encoder that a pipeline can have."""
    return next((each.activation_checkpointing for each in config.encoders.values()), None)


def _one_word(words: _Words) -> Checkpointing:
    return words if isinstance(words, str) else "none"


def _uniform(word: Checkpointing, every: int) -> MemoryStrategy:
    if word == "every_n":
        return MemoryStrategy(MemoryKind.RECOMPUTE, every=every)
    return MemoryStrategy.RECOMPUTE if word == "adaptive" else MemoryStrategy(_KINDS[word])


def _stage_memory(words: _Words, stage: Stage, every: int) -> StageMemory:
    if not stage.has_backward:
        return MemoryStrategy.KEEP
    if isinstance(words, str):
        return _uniform(words, every)
    return stage_memory([_KINDS[words[layer]] for layer in stage.layers])


def _check_lists(config: RunConfig, partition: Partition, words: Mapping[StageModule, _Words]) -> None:
    for module, each in words.items():
        stages = partition.of_module(module)
        num_layers = sum(len(stage.layers) for stage in stages)
        if isinstance(each, str) or not stages or len(each) == num_layers:
            continue
        is_backbone = module is StageModule.BACKBONE
        name = "backbone" if is_backbone else f"encoders.{next(iter(config.encoders))}"
        key, layer = f"{name}.activation_checkpointing", "decoder layer" if is_backbone else "encoder layer"
        raise ConfigError.of(
            key,
            FaultCode.VALUE,
            f"{key} lists {len(each)} layers, and the {module} has {num_layers}; give one word for each {layer}, or "
            "one word for all",
        )
