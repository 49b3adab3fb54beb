"""One HF ``LlavaConfig`` for a run: that of a whole checkpoint, or one joined from the modules' configurations."""

from __future__ import annotations

import copy
from typing import Literal, TypeVar

from transformers import LlavaConfig, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.activations import ACT2FN

from flowtrain.config.run import RunConfig
from flowtrain.errors import ConfigError
from flowtrain.models.towers import tower_kind
from flowtrain.models.weights import did_you_mean, read_config

Whole = TypeVar("Whole", bound=PreTrainedConfig)
"""Configuration of a whole vision-language model with the names that HF's Llava has."""

_NOT_IN_LLAVA = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Settings of text models that scale or cap the logits. HF's classes of whole models do not have them."""

_PACKABLE_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Kinds of decoder layers in which ``flowtrain.models.attention`` keeps packed sequences apart."""


VOCABULARY_GRAIN = 64
"""A vocabulary grows for new tokens to a multiple of this, so that tensor parallel ranks can share it evenly."""


def read_llava_config(config: RunConfig) -> LlavaConfig:
    """The model's HF configuration, before the tokenizer is known; raises ConfigError if no Llava model can be built.

    With ``model.path`` everything comes from the checkpoint. That includes ``feature_layer``, ``feature_select`` and
    the connector's settings, since the weights were trained with them.
    """
    llava_config = _of_checkpoint(config.model.path) if config.model.path is not None else _of_modules(config)
    check_parts(llava_config, config)
    return llava_config


def check_parts(whole: PreTrainedConfig, config: RunConfig) -> None:
    """Let the language model tie its embeddings as the whole does; raises ConfigError if it cannot be trained."""
    text_config = text_part(whole)
    text_config.tie_word_embeddings = whole.tie_word_embeddings
    _check_text_config(text_config, "model.path" if config.model.path is not None else "backbone")
    encoder = next(iter(config.encoders))
    _check_feature_layer(whole, encoder)
    _check_divides(vision_part(whole), "num_attention_heads", "hidden_size", f"encoders.{encoder}")
    _check_divides(text_config, "num_key_value_heads", "num_attention_heads", "backbone")


def text_part(whole: PreTrainedConfig) -> PreTrainedConfig:
    """The language model's configuration."""
    assert isinstance(whole.text_config, PreTrainedConfig)
    return whole.text_config


def vision_part(whole: PreTrainedConfig) -> PreTrainedConfig:
    """The vision tower's configuration."""
    assert isinstance(whole.vision_config, PreTrainedConfig)
    return whole.vision_config


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


def _check_text_config(text_config: PreTrainedConfig, key: str) -> None:
    model_type = text_config.model_type
    if not getattr(text_config, "base_model_tp_plan", None):
        raise ConfigError(f"{key}: {model_type!r} has no base_model_tp_plan in transformers; use e.g. qwen3 or llama")
    other_layers = set(getattr(text_config, "layer_types", None) or ()) - _PACKABLE_LAYERS
    if other_layers:
        raise ConfigError(
            f"{key}: {model_type!r} has {', '.join(sorted(other_layers))} layers; packed sequences would mix in them"
        )
    for name in _NOT_IN_LLAVA:
        if getattr(text_config, name, None) not in (None, 1, 1.0):
            raise ConfigError(
                f"{key}: {model_type!r} has {name} ({getattr(text_config, name)}), which HF's Llava class would drop"
            )


def _check_feature_layer(whole: PreTrainedConfig, encoder: str) -> None:
    layer, num_layers = feature_layer(whole), vision_part(whole).num_hidden_layers
    if not -num_layers - 1 <= layer <= num_layers:
        raise ConfigError(
            f"encoders.{encoder}.feature_layer ({layer}) is out of range: the tower has {num_layers} layers "
            f"(num_hidden_layers), so -{num_layers + 1} to {num_layers} exist"
        )


def _check_divides(config: PreTrainedConfig, divisor_name: str, name: str, key: str) -> None:
    """Find impossible shapes before anything starts; HF finds some of them only when it builds the model."""
    divisor, value = getattr(config, divisor_name, None) or 1, getattr(config, name)
    if value % divisor != 0:
        raise ConfigError(f"{key}.config: {divisor_name} ({divisor}) does not divide {name} ({value})")


def with_tokenizer(
    whole: Whole,
    tokenizer: PreTrainedTokenizerBase,
    image_token: str,
    image_token_id: int,
    config: RunConfig,
) -> Whole:
    """A copy that fits the tokenizer: it has the image token's id and a vocabulary that holds all tokens.

    A pretrained backbone's vocabulary grows if needed (its embeddings are resized when loaded). A vocabulary larger
    than the tokenizer's stays. Raises ConfigError if a backbone built from a configuration is too small, or if a whole
    checkpoint has another image token.
    """
    whole = copy.deepcopy(whole)
    text_config = text_part(whole)
    field = whole.attribute_map.get("image_token_id", "image_token_id")
    expected_id = getattr(whole, field)
    if config.model.path is not None and expected_id != image_token_id:
        raise ConfigError(
            f"model.image_token: {image_token!r} has id {image_token_id}, but {field} of "
            f"{config.model.path!r} is {expected_id} ({tokenizer.convert_ids_to_tokens(expected_id)!r})"
        )
    # Not the number of tokens: ids may have gaps, and under TP an id beyond the embedding would read as zeros.
    num_ids = 1 + max(tokenizer.get_vocab().values())
    if num_ids > text_config.vocab_size:
        if config.backbone.config is not None:
            raise ConfigError(
                f"backbone.config.vocab_size ({text_config.vocab_size}) is smaller than the tokenizer "
                f"({num_ids} tokens with {image_token!r}); raise it to at least {num_ids}"
            )
        text_config.vocab_size = -(-num_ids // VOCABULARY_GRAIN) * VOCABULARY_GRAIN
    setattr(whole, field, image_token_id)
    return whole
