"""Sources of a module: HF configurations, pretrained weights, whole checkpoints, seeded random weights."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, ClassVar, TypeVar, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.utils import logging

from flowtrain.errors import ConfigError
from flowtrain.models.weight_files import reading, safetensors_files

Model = TypeVar("Model", bound=PreTrainedModel)

_MAX_SHOWN = 400
_LEGACY_CONFIG_KEYS = frozenset({"rope_theta", "rope_scaling", "dtype", "torch_dtype", "architectures"})


@dataclass(frozen=True, slots=True)
class PartNames:
    """What the weights of a model's parts are called in its HF class, and in files of the whole model."""

    vision: str
    """Beginning of the tower's names in the class."""
    connector: str
    """Beginning of the connector's names in the class."""
    stored: Mapping[str, Mapping[str, str]]
    """By part (``vision``, ``connector``, ``language``): beginnings of names in files, and what the part's own names
    have in their place. The first that fits counts."""


LLAVA_NAMES = PartNames(
    vision="model.vision_tower.",
    connector="model.multi_modal_projector.",
    # The layout that HF writes, and that of the class in memory.
    stored={
        "vision": {"vision_tower.": "", "model.vision_tower.": ""},
        "connector": {"multi_modal_projector.": "", "model.multi_modal_projector.": ""},
        "language": {"model.language_model.": "model.", "lm_head.": "lm_head.", "language_model.": ""},
    },
)


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
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{key}.config.model_type: transformers knows no {model_type!r}") from error
    for name in sorted(values.keys() - known.keys() - _LEGACY_CONFIG_KEYS):
        raise ConfigError(f"{key}.config.{name} is no setting of {model_type}{did_you_mean(name, known)}")
    try:
        return AutoConfig.for_model(model_type, **values)
    except Exception as error:  # HF's classes compute with values that nothing has checked
        raise ConfigError(f"{key}.config: {model_type} refuses it: {in_a_line(error)}") from error


def check_builds(config: PreTrainedConfig, key: str) -> None:
    """Build a module with one layer, on no device: some values of its configuration fail only there.

    key: configuration key of the module. Imports the model's code. Raises ConfigError that says what the class makes of
    it; a class that only a whole model has is not tried.
    """
    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else MODEL_MAPPING
    if type(config) not in known:
        return
    small = copy.deepcopy(config)
    try:
        for name in ("num_hidden_layers", "depth"):
            if isinstance(getattr(small, name, None), int):
                setattr(small, name, 1)
        if isinstance(getattr(small, "layer_types", None), list):
            small.layer_types = small.layer_types[:1]
        with torch.device("meta"), no_init_weights():
            known[type(small)]._from_config(small, dtype=torch.float32)
    except Exception as error:  # HF's classes compute with values that nothing has checked
        raise ConfigError(
            f"{key}.config: no {config.model_type} can be built with these values: {in_a_line(error)}; correct them, "
            "or leave out those that the model's own documentation does not name"
        ) from error


def in_a_line(error: Exception) -> str:
    """What an error of another library says, short and in one line."""
    text = " ".join(str(error).split()) or "no reason given"
    return f"{type(error).__name__}: {text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + '...'}"


def tower_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """HF's model class of a vision tower."""
    return cast(type[PreTrainedModel], MODEL_MAPPING[type(config)])


def language_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """HF's causal language model class of a text configuration, or its base model with a head where HF has none."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    return _with_head(cast("Any", type(config)))


@cache
def _with_head(type_of_config: Any) -> type[PreTrainedModel]:
    base_class: Any = MODEL_MAPPING[type_of_config]

    class LanguageModelWithHead(base_class.__base__):
        config_class = type_of_config
        base_model_prefix = "model"
        _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            self.model = base_class(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

    return LanguageModelWithHead


def whole_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """HF's class of a whole vision-language model."""
    return cast(type[PreTrainedModel], MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)])


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint for an error message: the nearest known name, or nothing."""
    near = get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    """Turn off HF's bar over the weights of a module, which would be a line in the log of every actor."""
    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


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
        with _without_progress_bar():
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
    """A checkpoint of the whole HF model."""
    names: PartNames = LLAVA_NAMES
    """What that calls its weights."""

    @property
    def is_random(self) -> bool:
        """Whether the weights are random."""
        return self.path is None and self.checkpoint is None

    @property
    def source(self) -> tuple[str, str] | None:
        """Checkpoint that has the weights, and its configuration key; None if they are random."""
        if self.path is not None:
            return self.path, f"{self.key}.path"
        return None if self.checkpoint is None else (self.checkpoint, "model.path")

    def module_name(self, stored_as: str) -> str | None:
        """Return a stored weight's name in the module, or None if it belongs to another module."""
        return name_in_module(stored_as, self.module, self.names) if self.path is None else stored_as

    def build(self, model_class: type[Model], config: PreTrainedConfig, **kwargs: Any) -> Model:
        """Build a model with float32 weights; kwargs go to HF. Raises ConfigError if weights are missing.

        All random values (the whole model, or rows that a checkpoint lacks) depend on seed and module alone.
        """
        config = copy.deepcopy(config)
        with seeded(self.seed, self.module):
            if self.is_random:
                return model_class._from_config(config, dtype=torch.float32, **kwargs)
            state = None if self.path is not None else self.checkpoint_state()
            return load_pretrained(model_class, config, source=self.path, state=state, key=self.key, **kwargs)

    def checkpoint_state(self) -> dict[str, Tensor]:
        """The module's weights in the whole model's checkpoint, under the module's own names."""
        assert self.checkpoint is not None
        return dict(checkpoint_state(self.checkpoint, self.module, self.names))


def checkpoint_state(checkpoint: str, module: str, names: PartNames = LLAVA_NAMES) -> Iterator[tuple[str, Tensor]]:
    """Weights of one module of a whole HF checkpoint, under the module's own names; others are not read.

    Raises ConfigError for files that cannot be read.
    """
    with reading(checkpoint, "model.path"):
        for file in safetensors_files(checkpoint, "model.path"):
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118 (no mapping)
                    name = name_in_module(key, module, names)
                    if name is not None:
                        yield name, tensors.get_tensor(key)


def name_in_module(key: str, module: str, names: PartNames = LLAVA_NAMES) -> str | None:
    """Return a whole checkpoint's key as the module's own name, or None if it belongs to another module."""
    for stored, own in names.stored[module].items():
        if key.startswith(stored):
            return own + key.removeprefix(stored)
    return None
