"""What a checkpoint is, by its ``config.json`` alone, and which family trains it; no weights are read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from huggingface_hub.errors import HfHubHTTPError
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoTokenizer, PreTrainedConfig

from flowtrain.config.home import expanded
from flowtrain.config.model import Dtype
from flowtrain.errors import ConfigError
from flowtrain.models.families.registry import FAMILIES
from flowtrain.models.towers import TOWERS
from flowtrain.models.weights import read_config

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Settings of a text model that count experts."""
_OF_VIDEOS = re.compile(r"video|vivit|timesformer|vjepa")
"""In the ``model_type`` of models that take videos, not images."""
_LOOKS_LIKE_A_PATH = re.compile(r"[./~]|.*/.*/|.*\\")


@dataclass(frozen=True)
class CheckpointKind:
    """A checkpoint that FlowTrain can start from."""

    model: str
    """An absolute directory, or a hub id."""
    family: str | None
    """The family that trains it as a whole; None: it is a language model, and so a backbone."""
    config: PreTrainedConfig
    dtype: Dtype
    """Compute type that its weights have been trained with."""

    @property
    def max_positions(self) -> int | None:
        """The longest sequence that its text model is made for, in tokens; None if it does not say."""
        text_config = self.config.get_text_config()
        length: int | None = getattr(text_config, "max_position_embeddings", None)
        return length

    @property
    def image_token(self) -> str | None:
        """The token of its tokenizer that its configuration names for images; None if it names none."""
        token_id = getattr(self.config, "image_token_id", None)
        if token_id is None:
            return None
        try:
            tokenizer = AutoTokenizer.from_pretrained(self.model, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.model}: no tokenizer can be read: {error}") from error
        token = tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(token, str):
            raise ConfigError(
                f"{self.model}: its tokenizer has no token {token_id}, which config.json names for images"
            )
        return token


def checkpoint_kind(model: str) -> CheckpointKind:
    """Read the configuration of a directory or hub id.

    Raises ConfigError, which names the reason, for what FlowTrain does not train: models that bring code of their own
    (``trust_remote_code``), mixtures of experts, video models, vision towers alone, and types without a family.
    """
    folder = expanded(model)
    if not folder.is_dir() and _LOOKS_LIKE_A_PATH.match(model):
        raise ConfigError(f"{model}: there is no such directory, and it is no hub id (owner/name)")
    model = str(folder.resolve()) if folder.is_dir() else model
    values = _config_values(model)
    _refuse_code(model, values)
    model_type = str(values.get("model_type"))
    _refuse_experts(model, model_type, values)
    if _OF_VIDEOS.search(model_type):
        raise ConfigError(f"{model}: {model_type!r} is a video model; FlowTrain trains on images, so take another")
    if model_type in FAMILIES:
        return CheckpointKind(model, model_type, read_config(model, None, "model"), _dtype(values))
    _refuse_tower(model, model_type)
    config = read_config(model, None, "model")
    if "vision_config" in values or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"{model}: FlowTrain has no family for {model_type!r}; take a checkpoint of {', '.join(FAMILIES)}, or a "
            "causal language model (qwen3, llama, ...) as the backbone of a new llava model"
        )
    return CheckpointKind(model, None, config, _dtype(values))


def _config_values(model: str) -> Mapping[str, Any]:
    try:
        values, _ = PreTrainedConfig.get_config_dict(model)
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise ConfigError(f"{model}: no config.json of a model can be read: {error}") from error
    if not values:
        raise ConfigError(f"{model}: no config.json of a model can be read: the directory has none")
    if not values.get("model_type"):
        raise ConfigError(f"{model}: config.json has no model_type, so it is no model that transformers knows")
    return values


def _refuse_code(model: str, values: Mapping[str, Any]) -> None:
    code = values.get("auto_map")
    if code:
        named = ", ".join(sorted(str(each) for each in code.values())) if isinstance(code, Mapping) else str(code)
        raise ConfigError(
            f"{model}: brings code of its own (auto_map in config.json: {named}), which FlowTrain never runs "
            "(trust_remote_code); take the checkpoint in transformers' own format, whose name often ends in -HF"
        )


def _refuse_experts(model: str, model_type: str, values: Mapping[str, Any]) -> None:
    text = values.get("text_config")
    parts = [values, text] if isinstance(text, Mapping) else [values]
    counts = [(name, part[name]) for part in parts for name in _EXPERTS if isinstance(part.get(name), int)]
    found = next((f" ({name} {count})" for name, count in counts if count > 1), None)
    if found is not None or "moe" in model_type:
        raise ConfigError(
            f"{model}: {model_type!r} is a mixture of experts{found or ''}, which FlowTrain does not train; take a "
            "dense model"
        )


def _refuse_tower(model: str, model_type: str) -> None:
    if model_type in (*TOWERS, "clip", "siglip"):
        raise ConfigError(
            f"{model}: {model_type!r} is a vision tower; give the language model, and this as its encoder: "
            f"flowtrain init LANGUAGE_MODEL --encoder {model}"
        )


def _dtype(values: Mapping[str, Any]) -> Dtype:
    for part in (values, values.get("text_config")):
        if isinstance(part, Mapping) and (name := part.get("dtype") or part.get("torch_dtype")):
            return "bfloat16" if str(name).removeprefix("torch.") in ("bfloat16", "float16") else "float32"
    return "float32"
