"""A starting configuration for a checkpoint: what follows from the model is set, the rest has a usable value.

Of the model only the configuration, the tokenizer and the processor are read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from glob import has_magic
from pathlib import Path
from typing import Any

import torch

from flowtrain.config.commented_yaml import comment, commented_yaml
from flowtrain.config.home import expanded
from flowtrain.config.load import config_of_text
from flowtrain.config.model import EncoderConfig, ModelConfig
from flowtrain.config.run import RunConfig
from flowtrain.config.starting_file import check_data, next_commands, run_name
from flowtrain.controller.prepare import check_memory
from flowtrain.costs.devices import device_spec
from flowtrain.data.sources.source_set import SourceSet
from flowtrain.data.trainable_template import trainable_template
from flowtrain.errors import ConfigError, FlowTrainError
from flowtrain.flow.units import num_steps_of
from flowtrain.models.checkpoint_kind import CheckpointKind, checkpoint_kind
from flowtrain.models.device import device_name
from flowtrain.models.families.base import Family
from flowtrain.models.families.registry import FAMILIES, family_from_config

ENCODER = "vision"
"""Its name."""
DEFAULT_ENCODER = "google/siglip-so400m-patch14-384"
_SHAPE_OF_DEFAULT = {
    "model_type": "siglip_vision_model",
    "image_size": 384,
    "patch_size": 14,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
}
"""Stands for the default encoder in checks, which so need not reach the hub."""
YOUR_DATA = "/path/to/your/data"
_MAX_SEQ_LEN = 4096
_PICTURE = (1920, 1080)
"""Width and height, in pixels, of the image by which lengths are chosen."""
_WARMUP_STEPS = 100
_HINTS = {
    "model": ["freeze: [backbone] # trains the connector alone; encoders are frozen anyway"],
    "data.sources.0": ["weight: 0.8 # several sources make a mixture"],
    "data": ["eval: {path: /path/to/held/out/data, every_steps: 250, num_generated: 4}"],
}
"""Keys that many set, as comments."""


@dataclass(frozen=True)
class StartingConfig:
    """A configuration to start from."""

    file: Path
    text: str
    """The YAML."""
    config: RunConfig
    """What the text says."""
    to_fill_in: tuple[str, ...]
    """Keys whose values only the user knows; ``flowtrain train --dry-run`` refuses the file before."""
    has_rates: bool
    """``mode: auto`` can plan for this machine. It has no rates of CPUs, before ``flowtrain profile`` has measured."""
    notes: tuple[str, ...] = ()
    """What was chosen in the user's place, a line each."""


def starting_config(model: str, data: str | None, encoder: str | None, file: Path) -> StartingConfig:
    """Return a configuration for a directory or hub id; nothing is written.

    data: a path or URL for ``data.sources``. encoder: the vision tower of a language model. file: where it will be.
    Raises ConfigError for a model that FlowTrain does not train, as ``checkpoint_kind`` does, or if its parts do not
    fit together.
    """
    kind = checkpoint_kind(model)
    if kind.family is not None and encoder is not None:
        raise ConfigError(
            f"--encoder {encoder}: {kind.model} is a whole {kind.family} model with an encoder of its own; leave the "
            "option out, or give a language model"
        )
    if data is not None:
        check_data(_absolute(data), file)
    values, remarks = _values(kind, data, encoder), _remarks(kind, encoder)
    config = _load(values, remarks, file, data)
    family = _checked_family(values, config, encoder)
    notes = []
    if kind.family is None and encoder is None:
        notes.append(f"vision tower: {DEFAULT_ENCODER} (--encoder MODEL to choose another)")
    num_tokens = family.image_layout(ENCODER, *_PICTURE).num_tokens
    length = _sequence_length(kind, num_tokens)
    values["data"]["max_seq_len"], values["scheduler"]["microbatch_tokens"] = length, 2 * length
    size = " x ".join(map(str, _PICTURE))
    remarks["data.max_seq_len"] = f"a longer sample is rejected; an image of {size} pixels has {num_tokens:,} tokens"
    image_token = str(family.tokenizer.convert_ids_to_tokens(family.image_token_id))
    replacement = trainable_template(family.tokenizer, image_token, family.image_text)
    if replacement is not None:
        values["model"]["chat_template"] = replacement.template
        remarks["model.chat_template"] = f"{replacement.text} (docs/data.md)"
        notes.append(f"chat template: {replacement.text}")
    if data is not None and (num_steps := _steps_at_hand(config)) is not None:
        _fit_warmup(values["training"], remarks, num_steps)
    values["encoders"][ENCODER]["segment_nbytes"] = _segment_nbytes(_load(values, remarks, file, data), family)
    has_rates = _has_data_sheet()
    text = _text(kind, values, remarks, next_commands(file.name, data is not None, has_rates))
    config = config_of_text(text, file, check_paths=data is not None)
    to_fill_in = ("data.sources.0.path",) if data is None else ()
    return StartingConfig(file, text, config, to_fill_in, has_rates, tuple(notes))


def _values(kind: CheckpointKind, data: str | None, encoder: str | None) -> dict[str, Any]:
    is_whole = kind.family is not None
    model = {"family": kind.family or "llava", "path": kind.model if is_whole else None}
    token = kind.image_token if is_whole else None
    model |= {"image_token": token or ModelConfig().image_token, "dtype": kind.dtype}
    tower = {"path": None if is_whole else _absolute(encoder or DEFAULT_ENCODER), "decode_threads": 2}
    training: dict[str, Any] = {"num_epochs": 1, "global_batch_size": 64, "learning_rate": 1e-5 if is_whole else 2e-5}
    if not is_whole:
        training["learning_rates"] = {"connector": 1e-3}
    training |= {"lr_schedule": "cosine", "warmup_steps": _WARMUP_STEPS}
    values = {
        "name": run_name(kind.model),
        "seed": 0,
        "mode": "auto",
        "model": _given(model),
        "encoders": {ENCODER: _given(tower)},
        "backbone": None if is_whole else {"path": kind.model},
        "data": {"sources": [{"path": YOUR_DATA if data is None else _absolute(data)}], "max_seq_len": _MAX_SEQ_LEN},
        "training": training,
        "scheduler": {"microbatch_tokens": 2 * _MAX_SEQ_LEN},
        "checkpoint": {"every_steps": 250},
    }
    return _given(values)


def _remarks(kind: CheckpointKind, encoder: str | None) -> dict[str, str]:
    of_tower = "CLIP, SigLIP, DINOv2 or ViT: a directory or hub id" if encoder is None else "frozen"
    return {
        "mode": "what a plan finds fastest for the devices at hand; on CPUs it needs allocator.profile (docs/modes.md)",
        "model.path": "all of it: encoder, connector, backbone, tokenizer and image processor",
        "model.dtype": "of the checkpoint; master weights are always float32",
        f"encoders.{ENCODER}.path": of_tower,
        f"encoders.{ENCODER}.segment_nbytes": "one encoder holds a worst-case step; with several, less is enough",
        "backbone.path": "with its tokenizer",
        "data.sources.0.path": "Parquet, JSON, JSONL or tar shards, local or remote (docs/data.md)",
        "training.learning_rates.connector": "it starts from random weights",
        "scheduler.microbatch_tokens": "capacity of a packed microbatch; mode: auto may choose another",
    }


def _text(kind: CheckpointKind, values: Mapping[str, Any], remarks: Mapping[str, str], commands: Sequence[str]) -> str:
    what = "" if kind.family is not None else " as the backbone of a new llava model"
    head = (
        f"# Starts from {comment(kind.model)}{what}.\n"
        "# Written by `flowtrain init`. Keys that are left out have their defaults (flowtrain/config).\n"
    ) + "".join(f"#   {command}\n" for command in commands)
    hint = FAMILIES[values["model"]["family"]].image_hint
    hints = _HINTS if hint is None else {**_HINTS, f"encoders.{ENCODER}": [hint]}
    return head + commented_yaml(values, remarks, hints)


def _load(values: Mapping[str, Any], remarks: Mapping[str, str], file: Path, data: str | None) -> RunConfig:
    return config_of_text(commented_yaml(values, remarks, {}), file, check_paths=data is not None)


def _checked_family(values: dict[str, Any], config: RunConfig, encoder: str | None) -> Family:
    """The family, whose parts fit together; a llava whose images vary in size becomes a variable_llava."""
    config = _checkable(config, encoder)
    try:
        return family_from_config(config)
    except ConfigError as error:
        if config.model.family != "llava":
            raise
        variable = config.model.model_copy(update={"family": "variable_llava"})
        try:
            family = family_from_config(config.model_copy(update={"model": variable}))
        except ConfigError:
            raise error from None
        values["model"]["family"] = "variable_llava"
        return family


def _checkable(config: RunConfig, encoder: str | None) -> RunConfig:
    """The configuration without anything that has to be fetched only for checks."""
    if config.model.path is not None or encoder is not None:
        return config
    stand_in = config.encoders[ENCODER].model_copy(update={"path": None, "config": _SHAPE_OF_DEFAULT})
    return config.model_copy(update={"encoders": {ENCODER: stand_in}})


def _sequence_length(kind: CheckpointKind, image_tokens: int) -> int:
    """Room for two pictures, or one and its text, as far as the model goes; a power of two."""
    length = max(_MAX_SEQ_LEN, 1 << (2 * image_tokens - 1).bit_length())
    return min(length, kind.max_positions or length)


def _segment_nbytes(config: RunConfig, family: Family) -> int:
    """The first doubling of the default with which the pool of one encoder holds a worst-case step."""
    encoder = config.encoders[ENCODER]
    nbytes = int(EncoderConfig.model_fields["segment_nbytes"].default)
    while True:
        sized = encoder.model_copy(update={"segment_nbytes": nbytes})
        try:
            check_memory(config.model_copy(update={"encoders": {ENCODER: sized}}), family, num_eval=0)
        except ConfigError:
            if 2 * nbytes > config.pool.max_segment_nbytes:
                raise
            nbytes *= 2
        else:
            return nbytes


def _steps_at_hand(config: RunConfig) -> int | None:
    """The run's steps; None if only a look through all of the data could tell, or if the data cannot be read."""
    (source,) = config.data.sources
    path = Path(source.path)
    if not (path.is_file() and path.suffix == ".parquet") and next(path.glob("*.parquet"), None) is None:
        return None
    try:
        indexes = SourceSet.index(config.data)
    except FlowTrainError:  # also storage that cannot be reached
        return None  # `flowtrain data check` says why
    return num_steps_of(config.training, [index.num_rows for index in indexes])[0]


def _fit_warmup(training: dict[str, Any], remarks: dict[str, str], num_steps: int) -> None:
    """Warm up for a tenth of a short run, which would otherwise end before it reaches its learning rate."""
    fitting = num_steps // 10
    if fitting < training["warmup_steps"]:
        training["warmup_steps"] = fitting
        remarks["training.warmup_steps"] = f"a tenth of the {num_steps:,} steps"


def _has_data_sheet() -> bool:
    """Whether ``mode: auto`` has rates for the devices of this machine."""
    if not torch.accelerator.is_available():
        return False
    device = torch.accelerator.current_accelerator()
    return device is not None and device_spec(device_name(device)) is not None


def _absolute(path: str) -> str:
    """A local path or pattern as it is found from anywhere; URLs and hub ids stay."""
    local = expanded(path)
    is_local = "://" not in path and (local.is_absolute() or local.exists() or has_magic(path))
    return os.path.abspath(local) if is_local else path


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
