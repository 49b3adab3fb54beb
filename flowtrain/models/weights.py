"""Sources of a module: HF configurations, pretrained weights, whole checkpoints, seeded random weights."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeVar, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel

from flowtrain.errors import ConfigError
from flowtrain.models.weight_files import reading, safetensors_files

Model = TypeVar("Model", bound=PreTrainedModel)

_CHECKPOINT_PREFIXES = {
    "vision": ("vision_tower.", "model.vision_tower."),
    "connector": ("multi_modal_projector.", "model.multi_modal_projector."),
    "language": ("language_model.",),
}
_LEGACY_CONFIG_KEYS = frozenset({"rope_theta", "rope_scaling", "dtype", "torch_dtype", "architectures"})


@contextmanager
def seeded(seed: int, module: str) -> Iterator[None]:
    """Seed torch's CPU generator from the seed and the module's name alone; restores its state at the end."""
    digest = hashlib.sha256(f"{seed}/{module}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        # not torch.manual_seed, which would reseed accelerators too
        torch.random.default_generator.manual_seed(int.from_bytes(digest[:8], "little"))
        yield


def read_config(path: str | None, mapping: Mapping[str, Any] | None, key: str) -> PreTrainedConfig:
    """The HF configuration of a module, from a directory or hub id, or from a mapping with ``model_type``.

    key: configuration key of the module, for messages. Raises ConfigError for a configuration that HF cannot read or a
    setting that it does not know.
    """
    if path is not None:
        try:
            return AutoConfig.from_pretrained(path, trust_remote_code=False)
        except (OSError, ValueError, StrictDataclassError) as error:
            raise ConfigError(f"{key}.path: no HF model can be read from {path!r}: {error}") from error
    assert mapping is not None
    values = dict(mapping)
    model_type = values.pop("model_type", None)
    if model_type is None:
        raise ConfigError(f"{key}.config has no model_type; give one (qwen3, llama, siglip_vision_model, ...)")
    try:
        known = vars(AutoConfig.for_model(model_type))
    except ValueError as error:
        raise ConfigError(f"{key}.config.model_type: transformers knows no {model_type!r}") from error
    for name in values.keys() - known.keys() - _LEGACY_CONFIG_KEYS:
        raise ConfigError(f"{key}.config.{name} is no setting of {model_type}{did_you_mean(name, known)}")
    try:
        return AutoConfig.for_model(model_type, **values)
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise ConfigError(f"{key}.config: {model_type} refuses it: {error}") from error


def tower_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """HF's model class of a vision tower."""
    return cast(type[PreTrainedModel], MODEL_MAPPING[type(config)])


def language_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """HF's causal language model class of a text configuration."""
    return cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint for an error message: the nearest known name, or nothing."""
    near = get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def load_pretrained(
    model_class: type[Model],
    config: PreTrainedConfig,
    *,
    source: str | None,
    state: Mapping[str, Tensor] | None,
    key: str,
    **kwargs: Any,
) -> Model:
    """Load float32 weights from a directory or hub id (``source``) or from ``state``; pickled weights are never read.

    key: configuration key, for messages. Raises ConfigError if weights are missing or cannot be read.
    """
    loaded: Any
    try:
        loaded = model_class.from_pretrained(
            source,
            config=config,
            state_dict=state,
            dtype=torch.float32,
            use_safetensors=True,
            output_loading_info=True,
            **kwargs,
        )
    except OSError as error:
        raise ConfigError(f"{key}: no weights can be read from {source!r}: {error}") from error
    model, report = loaded
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ConfigError(
            f"{key}: {len(missing)} weights of {model_class.__name__} are missing, {missing[0]!r} first; "
            "is it the right kind of model?"
        )
    return model


@dataclass(frozen=True, slots=True)
class Origin:
    """Source of one module's weights; with neither ``path`` nor ``checkpoint`` they are random."""

    module: str
    """``vision``, ``connector`` or ``language``."""
    seed: int
    """Seed of random weights."""
    key: str
    """Configuration key, for messages."""
    path: str | None = None
    """The module's own checkpoint."""
    checkpoint: str | None = None
    """A whole HF Llava checkpoint."""

    @property
    def is_random(self) -> bool:
        """Whether the weights are random."""
        return self.path is None and self.checkpoint is None

    def build(self, model_class: type[Model], config: PreTrainedConfig, **kwargs: Any) -> Model:
        """Build a model with float32 weights; kwargs go to HF. Raises ConfigError if weights are missing.

        All random values (the whole model, or rows that a checkpoint lacks) depend on seed and module alone.
        """
        config = copy.deepcopy(config)
        with seeded(self.seed, self.module):
            if self.is_random:
                return model_class._from_config(config, dtype=torch.float32, **kwargs)
            state = None if self.checkpoint is None else dict(checkpoint_state(self.checkpoint, self.module))
            return load_pretrained(model_class, config, source=self.path, state=state, key=self.key, **kwargs)


def checkpoint_state(checkpoint: str, module: str) -> Iterator[tuple[str, Tensor]]:
    """Weights of one module of a whole HF Llava checkpoint, under the module's own names; others are not read.

    Both layouts are understood: the one that HF writes (``language_model.model.*``) and the one of the class in memory
    (``model.language_model.*`` and ``lm_head.*``). Raises ConfigError for files that cannot be read.
    """
    with reading(checkpoint, "model.path"):
        for file in safetensors_files(checkpoint, "model.path"):
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118 (no mapping)
                    name = name_in_module(key, module)
                    if name is not None:
                        yield name, tensors.get_tensor(key)


def name_in_module(key: str, module: str) -> str | None:
    """Return a whole checkpoint's key as the module's own name, or None if it belongs to another module."""
    if module == "language":
        if key.startswith("model.language_model."):
            return "model." + key.removeprefix("model.language_model.")
        if key.startswith("lm_head."):
            return key
    for prefix in _CHECKPOINT_PREFIXES[module]:
        if key.startswith(prefix):
            return key.removeprefix(prefix)
    return None
