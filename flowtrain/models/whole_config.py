"""HF configurations of whole vision-language models: their two parts, and checks that all families share."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedTokenizerBase

from flowtrain.config.run import RunConfig
from flowtrain.errors import ConfigError

_PACKABLE_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Kinds of decoder layers in which ``flowtrain.models.attention`` keeps packed sequences apart."""

VOCABULARY_GRAIN = 64
"""A vocabulary grows for new tokens to a multiple of this, so that tensor parallel ranks can share it evenly."""

_BUILT_LIKE = {"qwen3_vl_text": "qwen3"}
"""Language models without a tensor parallel plan in transformers, and the type whose layers they have."""


def text_part(config: PreTrainedConfig) -> PreTrainedConfig:
    """The language model's configuration."""
    assert isinstance(config.text_config, PreTrainedConfig)
    return config.text_config


def vision_part(config: PreTrainedConfig) -> PreTrainedConfig:
    """The vision tower's configuration."""
    assert isinstance(config.vision_config, PreTrainedConfig)
    return config.vision_config


def tensor_parallel_plan(text_config: PreTrainedConfig) -> Mapping[str, str]:
    """Transformers' tensor parallel plan for a language model; empty if there is none."""
    plan: Mapping[str, str] | None = getattr(text_config, "base_model_tp_plan", None)
    if not plan and text_config.model_type in _BUILT_LIKE:
        plan = CONFIG_MAPPING[_BUILT_LIKE[text_config.model_type]].base_model_tp_plan
    return plan or {}


def check_text_config(text_config: PreTrainedConfig, key: str) -> None:
    """Raise ConfigError, naming ``key``, for a language model that no family can train."""
    model_type = text_config.model_type
    if not tensor_parallel_plan(text_config):
        raise ConfigError(f"{key}: {model_type!r} has no base_model_tp_plan in transformers; use e.g. qwen3 or llama")
    other_layers = set(getattr(text_config, "layer_types", None) or ()) - _PACKABLE_LAYERS
    if other_layers:
        raise ConfigError(
            f"{key}: {model_type!r} has {', '.join(sorted(other_layers))} layers; packed sequences would mix in them"
        )


def check_divides(config: PreTrainedConfig, divisor_name: str, name: str, key: str) -> None:
    """Find impossible shapes before anything starts; HF finds some of them only when it builds the model."""
    divisor, value = getattr(config, divisor_name, None) or 1, getattr(config, name)
    if value % divisor != 0:
        raise ConfigError(f"{key}.config: {divisor_name} ({divisor}) does not divide {name} ({value})")


def grow_vocabulary(
    text_config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, image_token: str, config: RunConfig
) -> None:
    """Let a vocabulary hold all tokens, in place; one that is larger than the tokenizer's stays.

    A pretrained backbone's embeddings are resized when they are loaded. Raises ConfigError if a backbone built from a
    configuration is too small.
    """
    # Not the number of tokens: ids may have gaps, and under TP an id beyond the embedding would read as zeros.
    num_ids = 1 + max(tokenizer.get_vocab().values())
    if num_ids > text_config.vocab_size:
        if config.backbone.config is not None:
            raise ConfigError(
                f"backbone.config.vocab_size ({text_config.vocab_size}) is smaller than the tokenizer "
                f"({num_ids} tokens with {image_token!r}); raise it to at least {num_ids}"
            )
        text_config.vocab_size = -(-num_ids // VOCABULARY_GRAIN) * VOCABULARY_GRAIN
