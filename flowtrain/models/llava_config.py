"""One HF ``LlavaConfig`` for a run: that of a whole checkpoint, or one joined from the modules' configurations."""

from __future__ import annotations

import copy
from typing import Literal

from transformers import LlavaConfig, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.activations import ACT2FN

from flowtrain.config.run import RunConfig
from flowtrain.errors import ConfigError
from flowtrain.models.towers import tower_kind
from flowtrain.models.weights import did_you_mean, read_config
from flowtrain.models.whole_config import check_divides, check_text_config, grow_vocabulary, text_part, vision_part

_NOT_IN_LLAVA = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Settings of text models that scale or cap the logits. HF's Llava class does not have them."""


def read_llava_config(config: RunConfig) -> LlavaConfig:
    """The model's HF configuration, before the tokenizer is known; raises ConfigError if no Llava model can be built.

    With ``model.path`` everything comes from the checkpoint. That includes ``feature_layer``, ``feature_select`` and
    the connector's settings, since the weights were trained with them.
    """
    llava_config = _of_checkpoint(config.model.path) if config.model.path is not None else _of_modules(config)
    text_config = text_part(llava_config)
    text_config.tie_word_embeddings = llava_config.tie_word_embeddings
    key = "model.path" if config.model.path is not None else "backbone"
    check_text_config(text_config, key)
    _check_logits(text_config, key)
    encoder = next(iter(config.encoders))
    _check_feature_layer(llava_config, encoder)
    check_divides(vision_part(llava_config), "num_attention_heads", "hidden_size", f"encoders.{encoder}")
    check_divides(text_config, "num_key_value_heads", "num_attention_heads", "backbone")
    return llava_config


def feature_layer(llava_config: LlavaConfig) -> int:
    """Index of the tower's hidden state that the connector sees."""
    assert isinstance(llava_config.vision_feature_layer, int)
    return llava_config.vision_feature_layer


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
    vision_config = _without_text_side(read_config(encoder.path, encoder.config, key))
    text_config = read_config(config.backbone.path, config.backbone.config, "backbone")
    act = config.connector.hidden_act
    if act not in ACT2FN:
        raise ConfigError(f"connector.hidden_act: transformers knows no activation {act!r}{did_you_mean(act, ACT2FN)}")
    strategy: Literal["default", "full"] | None = encoder.feature_select
    if strategy is None:
        strategy = "default" if tower_kind(vision_config, key).num_prefix_tokens(vision_config) > 0 else "full"
    return LlavaConfig(
        vision_config=vision_config,
        text_config=text_config,
        projector_hidden_act=act,
        multimodal_projector_bias=config.connector.bias,
        # HF's Llava takes a 0 for "none"; the same state counted from the end works
        vision_feature_layer=encoder.feature_layer or -vision_config.num_hidden_layers - 1,
        vision_feature_select_strategy=strategy,
        tie_word_embeddings=text_config.tie_word_embeddings,
    )


def _without_text_side(config: PreTrainedConfig) -> PreTrainedConfig:
    """The vision half of a whole CLIP or SigLIP checkpoint; any other configuration as it is."""
    return getattr(config, "vision_config", config)


def _check_logits(text_config: PreTrainedConfig, key: str) -> None:
    for name in _NOT_IN_LLAVA:
        if getattr(text_config, name, None) not in (None, 1, 1.0):
            raise ConfigError(
                f"{key}: {text_config.model_type!r} has {name} ({getattr(text_config, name)}), which HF's Llava class "
                "would drop"
            )


def _check_feature_layer(llava_config: LlavaConfig, encoder: str) -> None:
    layer, num_layers = feature_layer(llava_config), vision_part(llava_config).num_hidden_layers
    if not -num_layers - 1 <= layer <= num_layers:
        raise ConfigError(
            f"encoders.{encoder}.feature_layer ({layer}) is out of range: the tower has {num_layers} layers "
            f"(num_hidden_layers), so -{num_layers + 1} to {num_layers} exist"
        )


def with_tokenizer(
    llava_config: LlavaConfig,
    tokenizer: PreTrainedTokenizerBase,
    image_token: str,
    image_token_id: int,
    config: RunConfig,
) -> LlavaConfig:
    """A copy that fits the tokenizer: it has the image token's id and a vocabulary that holds all tokens.

    Raises ConfigError as ``grow_vocabulary``, and if a whole checkpoint has another image token.
    """
    llava_config = copy.deepcopy(llava_config)
    expected_id = llava_config.image_token_index
    if config.model.path is not None and expected_id != image_token_id:
        raise ConfigError(
            f"model.image_token: {image_token!r} has id {image_token_id}, but image_token_index of "
            f"{config.model.path!r} is {expected_id} ({tokenizer.convert_ids_to_tokens(expected_id)!r})"
        )
    grow_vocabulary(text_part(llava_config), tokenizer, image_token, config)
    llava_config.image_token_index = image_token_id
    return llava_config
