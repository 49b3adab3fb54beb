"""HF configurations of whole vision-language models: their two parts, and checks that all families share."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TypeVar

from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedTokenizerBase

from flowtrain.config.run import RunConfig
from flowtrain.errors import ConfigError

Whole = TypeVar("Whole", bound=PreTrainedConfig)
"""Configuration of a whole vision-language model."""

_NOT_IN_WHOLE = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Settings of text models that scale or cap the logits. HF's classes of whole models do not have them."""

_PACKABLE_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Kinds of decoder layers in which ``flowtrain.models.attention`` keeps packed sequences apart."""

VOCABULARY_GRAIN = 64
"""A vocabulary grows for new tokens to a multiple of this, so that tensor parallel ranks can share it evenly."""

_BUILT_LIKE = {"qwen3_vl_text": "qwen3"}
"""Language models without a tensor parallel plan in transformers, and the type whose layers they have."""


def text_part(whole: PreTrainedConfig) -> PreTrainedConfig:
    """The language model's configuration."""
    assert isinstance(whole.text_config, PreTrainedConfig)
    return whole.text_config


def vision_part(whole: PreTrainedConfig) -> PreTrainedConfig:
    """The vision tower's configuration."""
    assert isinstance(whole.vision_config, PreTrainedConfig)
    return whole.vision_config


def tensor_parallel_plan(text_config: PreTrainedConfig) -> Mapping[str, str]:
    """Transformers' tensor parallel plan for a language model; empty if there is none."""
    plan: Mapping[str, str] | None = getattr(text_config, "base_model_tp_plan", None)
    if not plan and text_config.model_type in _BUILT_LIKE:
        plan = CONFIG_MAPPING[_BUILT_LIKE[text_config.model_type]].base_model_tp_plan
    return plan or {}


def check_parts(whole: PreTrainedConfig, config: RunConfig) -> None:
    """Let the language model tie its embeddings as the whole does; raises ConfigError if it cannot be trained."""
    text_config = text_part(whole)
    text_config.tie_word_embeddings = whole.tie_word_embeddings
    _check_text_config(text_config, "model.path" if config.model.path is not None else "backbone")
    _check_divides(vision_part(whole), "num_attention_heads", "hidden_size", f"encoders.{next(iter(config.encoders))}")
    _check_divides(text_config, "num_key_value_heads", "num_attention_heads", "backbone")


def _check_text_config(text_config: PreTrainedConfig, key: str) -> None:
    model_type = text_config.model_type
    if not tensor_parallel_plan(text_config):
        raise ConfigError(f"{key}: {model_type!r} has no base_model_tp_plan in transformers; use e.g. qwen3 or llama")
    other_layers = set(getattr(text_config, "layer_types", None) or ()) - _PACKABLE_LAYERS
    if other_layers:
        raise ConfigError(
            f"{key}: {model_type!r} has {', '.join(sorted(other_layers))} layers; packed sequences would mix in them"
        )
    for name in _NOT_IN_WHOLE:
        if getattr(text_config, name, None) not in (None, 1, 1.0):
            raise ConfigError(
                f"{key}: {model_type!r} has {name} ({getattr(text_config, name)}), which HF's Llava class would drop"
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
