"""One HF ``LlavaConfig`` for a run: that of a whole checkpoint, or one joined from the modules' configurations."""

from __future__ import annotations

from typing import Literal

from transformers import LlavaConfig, PreTrainedConfig
from transformers.activations import ACT2FN

from flowtrain.config.run import RunConfig
from flowtrain.errors import ConfigError
from flowtrain.models.towers import tower_kind
from flowtrain.models.weights import did_you_mean, read_config
from flowtrain.models.whole_config import check_parts, vision_part


def read_llava_config(config: RunConfig) -> LlavaConfig:
    """The model's HF configuration, before the tokenizer is known; raises ConfigError if no Llava model can be built.

    With ``model.path`` everything comes from the checkpoint. That includes ``feature_layer``, ``feature_select`` and
    the connector's settings, since the weights were trained with them.
    """
    llava_config = _of_checkpoint(config.model.path) if config.model.path is not None else _of_modules(config)
    check_parts(llava_config, config)
    check_feature_layer(llava_config, next(iter(config.encoders)))
    return llava_config


def feature_layer(whole: PreTrainedConfig) -> int:
    """Index of the tower's hidden state that the connector sees."""
    assert isinstance(whole.vision_feature_layer, int)
    return whole.vision_feature_layer


def _of_checkpoint(path: str) -> LlavaConfig:
    llava_config = read_config(path, None, "model")
    if not isinstance(llava_config, LlavaConfig):
        raise ConfigError(
            f"model.path: {path!r} is a {llava_config.model_type!r} model, not 'llava'; give its parts as "
            "encoders.<name>.path and backbone.path instead"
        )
    if not isinstance(llava_config.vision_feature_layer, int):
        raise ConfigError(
            f"model.path: {path!r} joins several feature layers ({llava_config.vision_feature_layer}); only one is "
            "supported"
        )
    return llava_config


def _of_modules(config: RunConfig) -> LlavaConfig:
    name, encoder = next(iter(config.encoders.items()))
    key = f"encoders.{name}"
    vision_config = without_text_side(read_config(encoder.path, encoder.config, key))
    text_config = read_config(config.backbone.path, config.backbone.config, "backbone")
    strategy: Literal["default", "full"] | None = encoder.feature_select
    if strategy is None:
        strategy = "default" if tower_kind(vision_config, key).num_prefix_tokens(vision_config) > 0 else "full"
    return LlavaConfig(
        vision_config=vision_config,
        text_config=text_config,
        projector_hidden_act=known_activation(config),
        multimodal_projector_bias=config.connector.bias,
        # HF's Llava takes a 0 for "none"; the same state counted from the end works
        vision_feature_layer=encoder.feature_layer or -vision_config.num_hidden_layers - 1,
        vision_feature_select_strategy=strategy,
        tie_word_embeddings=text_config.tie_word_embeddings,
    )


def known_activation(config: RunConfig) -> str:
    """``connector.hidden_act``; raises ConfigError for one that transformers does not know."""
    act = config.connector.hidden_act
    if act not in ACT2FN:
        raise ConfigError(f"connector.hidden_act: transformers knows no activation {act!r}{did_you_mean(act, ACT2FN)}")
    return act


def without_text_side(config: PreTrainedConfig) -> PreTrainedConfig:
    """The vision half of a whole CLIP or SigLIP checkpoint; any other configuration as it is."""
    return getattr(config, "vision_config", config)


def check_feature_layer(whole: PreTrainedConfig, encoder: str) -> None:
    """Raise ConfigError if the tower has no such hidden state."""
    layer, num_layers = feature_layer(whole), vision_part(whole).num_hidden_layers
    if not -num_layers - 1 <= layer <= num_layers:
        raise ConfigError(
            f"encoders.{encoder}.feature_layer ({layer}) is out of range: the tower has {num_layers} layers "
            f"(num_hidden_layers), so -{num_layers + 1} to {num_layers} exist"
        )
