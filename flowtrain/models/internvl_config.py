"""One HF ``InternVLConfig`` for a run: that of a whole checkpoint, or one joined from the modules' configurations."""

from __future__ import annotations

import json

from transformers import InternVLConfig, PreTrainedConfig

from flowtrain.config.families import FEATURE_KEYS, given_keys
from flowtrain.config.model import ConnectorConfig
from flowtrain.config.run import RunConfig
from flowtrain.errors import ConfigError, FaultCode
from flowtrain.models.llava_config import (
    check_feature_layer,
    feature_layer,
    known_activation,
    without_text_side,
)
from flowtrain.models.weights import read_config
from flowtrain.models.whole_config import check_parts, vision_part

TOWER = "internvl_vision"
"""``model_type`` of the only tower that HF's InternVL can have here."""


def read_internvl_config(config: RunConfig) -> InternVLConfig:
    """The model's HF configuration, before the tokenizer is known; raises ConfigError if it cannot be trained.

    With ``model.path`` everything comes from the checkpoint.
    """
    path = config.model.path
    whole = _of_checkpoint(path) if path is not None else _of_modules(config)
    check_parts(whole, config)
    check_feature_layer(whole, next(iter(config.encoders)))
    if path is not None:
        _check_given(config, whole)
    key = "model.path" if path is not None else f"encoders.{next(iter(config.encoders))}"
    _check_shuffle(whole, key)
    _check_features(whole, key)
    return whole


def shuffle_factor(whole: PreTrainedConfig) -> int:
    """Side, in patches, of the squares that become one feature row."""
    return round(1 / whole.downsample_ratio)


def _of_checkpoint(path: str) -> InternVLConfig:
    whole = read_config(path, None, "model")
    if not isinstance(whole, InternVLConfig):
        raise ConfigError(
            f"model.path: {path!r} is a {whole.model_type!r} model, not 'internvl'; checkpoints for plain transformers "
            "have names that end in -hf"
        )
    if not isinstance(whole.vision_feature_layer, int):
        raise ConfigError(
            f"model.path: {path!r} has several feature layers ({whole.vision_feature_layer}); only one is supported"
        )
    return whole


def _of_modules(config: RunConfig) -> InternVLConfig:
    name, encoder = next(iter(config.encoders.items()))
    vision_config = without_text_side(read_config(encoder.path, encoder.config, f"encoders.{name}"))
    text_config = read_config(config.backbone.path, config.backbone.config, "backbone")
    if not config.connector.bias:
        raise ConfigError("connector.bias (false): HF's InternVL always has biases in its connector; set it to true")
    return InternVLConfig(
        vision_config=vision_config,
        text_config=text_config,
        projector_hidden_act=known_activation(config),
        # HF takes a 0 for "none"; the same state counted from the end works
        vision_feature_layer=encoder.feature_layer or -vision_config.num_hidden_layers - 1,
        vision_feature_select_strategy=encoder.feature_select or "default",
        tie_word_embeddings=text_config.tie_word_embeddings,
    )


def _check_shuffle(whole: InternVLConfig, key: str) -> None:
    """HF's class computes with the ratio as a float, which is exact for these alone."""
    if whole.downsample_ratio not in (1.0, 0.5, 0.25, 0.125):
        ratio = whole.downsample_ratio
        raise ConfigError(f"{key}: downsample_ratio ({ratio}) is none of 1, 0.5, 0.25 and 0.125; InternVL has 0.5")


def _check_features(whole: InternVLConfig, key: str) -> None:
    """Refuse towers and features whose rows pixel shuffle cannot join, or HF's class gets from elsewhere."""
    vision, layer = vision_part(whole), feature_layer(whole)
    if vision.model_type != TOWER:
        raise ConfigError(f"{key}: the tower is a {vision.model_type!r}; family internvl needs one of type {TOWER!r}")
    if whole.vision_feature_select_strategy != "default":
        raise ConfigError(
            f"{key}: vision_feature_select_strategy ({whole.vision_feature_select_strategy!r}) keeps the class token, "
            "which has no place in the grid of patches; use 'default' (encoders.<name>.feature_select)"
        )
    if not vision.use_mean_pooling and layer == -1:
        raise ConfigError(
            f"{key}: use_mean_pooling (false) puts a norm after the tower's last layer, which FlowTrain leaves out; "
            "set it to true, or choose another feature_layer than the last (-1)"
        )


def _check_given(config: RunConfig, whole: InternVLConfig) -> None:
    """Refuse keys of features and connector that say otherwise than the whole checkpoint, which decides.

    A key with its default counts as not given.
    """
    name, encoder = next(iter(config.encoders.items()))
    num_states = vision_part(whole).num_hidden_layers + 1
    in_checkpoint = {
        f"encoders.{name}.feature_layer": feature_layer(whole) % num_states - num_states,
        f"encoders.{name}.feature_select": whole.vision_feature_select_strategy,
        "connector.hidden_act": whole.projector_hidden_act,
        "connector.bias": True,
    }
    given = {f"encoders.{name}.{key}": value for key, value in given_keys(encoder, FEATURE_KEYS).items()}
    given |= {
        f"connector.{key}": value for key, value in given_keys(config.connector, ConnectorConfig.model_fields).items()
    }
    for key, value in given.items():
        stored = in_checkpoint[key]
        is_same = (value - stored) % num_states == 0 if key.endswith("feature_layer") else value == stored
        if not is_same:
            raise ConfigError.of(
                key,
                FaultCode.CONFLICT,
                f"{key} ({json.dumps(value)}) has no effect with model.path ({config.model.path!r}), whose weights "
                f"were trained with {json.dumps(stored)}; leave the key out",
            )
