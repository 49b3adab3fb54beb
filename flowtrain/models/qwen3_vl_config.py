"""One HF ``Qwen3VLConfig`` for a run: that of a whole checkpoint, or one joined from the modules' configurations."""

from __future__ import annotations

from transformers import PreTrainedConfig, Qwen3VLConfig

from flowtrain.config.run import RunConfig
from flowtrain.errors import ConfigError
from flowtrain.models.weights import PartNames, read_config
from flowtrain.models.whole_config import check_parts, text_part, vision_part

QWEN3_VL_NAMES = PartNames(
    vision="model.visual.",
    connector="model.visual.",  # the mergers are part of HF's tower
    stored={
        "vision": {"model.visual.": ""},
        "connector": {
            "model.visual.merger.": "merger.",
            "model.visual.deepstack_merger_list.": "deepstack_merger_list.",
        },
        "language": {"model.language_model.": "model.", "lm_head.": "lm_head."},
    },
)
_TOWER, _LANGUAGE = "qwen3_vl_vision", "qwen3_vl_text"


def read_qwen3_vl_config(config: RunConfig) -> Qwen3VLConfig:
    """The model's HF configuration, before the tokenizer is known; raises ConfigError if it cannot be trained.

    With ``model.path`` everything comes from the checkpoint.
    """
    path = config.model.path
    whole = _of_checkpoint(path) if path is not None else _of_modules(config)
    check_parts(whole, config)
    _check_tower(whole, "model.path" if path is not None else f"encoders.{next(iter(config.encoders))}.config")
    return whole


def deepstack_layers(vision_config: PreTrainedConfig) -> tuple[int, ...]:
    """The tower's layers after which a deepstack merger takes the hidden states, in order."""
    return tuple(vision_config.deepstack_visual_indexes)


def _of_checkpoint(path: str) -> Qwen3VLConfig:
    whole = read_config(path, None, "model")
    if not isinstance(whole, Qwen3VLConfig):
        dense = "; a mixture of experts is not supported, so use a dense Qwen3-VL" if "moe" in whole.model_type else ""
        raise ConfigError(f"model.path: {path!r} is a {whole.model_type!r} model, not 'qwen3_vl'{dense}")
    return whole


def _of_modules(config: RunConfig) -> Qwen3VLConfig:
    name, encoder = next(iter(config.encoders.items()))
    for key, module in ((f"encoders.{name}", encoder), ("backbone", config.backbone)):
        if module.path is not None:
            raise ConfigError(
                f"{key}.path ({module.path}): family qwen3_vl starts from a whole checkpoint, model.path, or from "
                "configurations; give one of these"
            )
    vision_config = _read(encoder.config, f"encoders.{name}", _TOWER)
    language = dict(config.backbone.config or {})
    is_tied = bool(language.pop("tie_word_embeddings", False))  # HF has it in the whole's configuration
    text_config = _read(language, "backbone", _LANGUAGE)
    return Qwen3VLConfig(vision_config=vision_config, text_config=text_config, tie_word_embeddings=is_tied)


def _read(mapping: dict[str, object] | None, key: str, model_type: str) -> PreTrainedConfig:
    found = (mapping or {}).get("model_type")
    if found != model_type:
        raise ConfigError(f"{key}.config.model_type ({found}): family qwen3_vl needs {model_type}")
    return read_config(None, mapping, key)


def _check_tower(whole: Qwen3VLConfig, key: str) -> None:
    vision, text = vision_part(whole), text_part(whole)
    layers, depth = deepstack_layers(vision), vision.num_hidden_layers
    if list(layers) != sorted(set(layers)) or any(not 0 <= layer < depth for layer in layers):
        raise ConfigError(
            f"{key}: deepstack_visual_indexes ({list(layers)}) must be layers of the tower in ascending order; it has "
            f"{depth} (depth)"
        )
    if len(layers) > text.num_hidden_layers:
        raise ConfigError(
            f"{key}: deepstack_visual_indexes ({list(layers)}) names more layers than the language model has "
            f"({text.num_hidden_layers}): each enters after one of its first layers"
        )
    if vision.out_hidden_size != text.hidden_size:
        raise ConfigError(
            f"{key}: out_hidden_size ({vision.out_hidden_size}) is not the language model's hidden_size "
            f"({text.hidden_size})"
        )
    for side in ("patch_size", "temporal_patch_size"):
        if not isinstance(getattr(vision, side), int):
            raise ConfigError(f"{key}: {side} ({getattr(vision, side)}) is not one number; use e.g. 16")
    head_width = vision.hidden_size // vision.num_attention_heads
    if head_width % 4:
        raise ConfigError(
            f"{key}: hidden_size ({vision.hidden_size}) over num_heads ({vision.num_attention_heads}) must be a "
            "multiple of 4, for rows and columns have a half of the rotary angles each"
        )
