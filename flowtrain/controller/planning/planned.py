"""The input of a plan, and how a model file becomes one; for a run see ``planned_run``. No Ray, no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from os import PathLike

from pydantic import ValidationError

from flowtrain.allocator.model_file import read_model_file
from flowtrain.config.home import expanded
from flowtrain.config.kept_choices import with_kept_choices
from flowtrain.config.load import override_config
from flowtrain.config.messages import Document, refused
from flowtrain.config.parameter_names import is_pattern
from flowtrain.config.run import RunConfig
from flowtrain.config.yaml_text import YamlError, parse_yaml
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.costs.trained import with_frozen_modules
from flowtrain.costs.workload import Workload
from flowtrain.errors import ConfigError, Fault

MODEL_FILE_BATCH_PATCHES = 16384
"""Patches of an encoder's largest batch for a model file: a few large pictures."""

_MODEL_FILE_KEYS = re.compile(
    r"model\.(dtype|freeze)|training\.(global_batch_size|optimizer)|scheduler\.(microbatch_tokens|lookahead_steps)|"
    r"backbone\.(activation_checkpointing|checkpoint_every|sharding|hybrid_shard_size|gradient_reduction|"
    r"sequence_parallel|attention|num_cpus)|pipeline\.(schedule|chunks|partition)|"
    r"mode|allocator\.(method|choose)|"
    r"encoders\.\w+\.(max_batch_patches|segment_nbytes|num_cpus)|"
    r"pool\.(hbm_segment_nbytes|feeder_segment_nbytes|network)|data\.num_feeders"
)
"""Keys that decide a plan in addition to the shapes and samples in the file."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The input of a plan: settings, shapes and data."""

    config: RunConfig
    model: ModelSpec
    workload: Workload
    source: str
    """Where shapes and sizes come from."""
    num_devices: int | None
    """Devices that the configuration's own degrees take; None if it has none."""
    pool_fault: Callable[[RunConfig], Fault | None] | None = None
    """Returns why a run with these settings could block for lack of room in the pool. The field is None if that is not
    known, as for a model file."""
    whole: frozenset[str] = frozenset()
    """Modules whose layers FlowTrain cannot split by tensor parallelism."""
    own_segments: frozenset[str] = frozenset()
    """For a model file: encoders whose ``segment_nbytes`` an override sets."""

    @property
    def is_run(self) -> bool:
        """Whether ``config`` is a run's own; otherwise it is what a model file is planned with."""
        return self.num_devices is not None


def is_model_file(path: str | PathLike[str]) -> bool:
    """Whether a YAML file has its own workload, as in ``configs/models``; False if it cannot be read."""
    try:
        values = parse_yaml(expanded(path).read_text(encoding="utf-8"))[0]
    except (OSError, UnicodeDecodeError, YamlError):
        return False
    return isinstance(values, dict) and "workload" in values


def assumed_settings(config: RunConfig) -> list[str]:
    """Return the settings with which a model file is planned, as overrides of a run's configuration."""
    keys = {
        "model.dtype": config.model.dtype,
        "backbone.activation_checkpointing": config.backbone.activation_checkpointing,
        "training.global_batch_size": config.training.global_batch_size,
        "scheduler.microbatch_tokens": config.scheduler.microbatch_tokens,
    }
    keys |= {f"encoders.{name}.max_batch_patches": each.max_batch_patches for name, each in config.encoders.items()}
    return [f"{key}={list(value) if isinstance(value, tuple) else value}" for key, value in keys.items()]


def planned_model(path: str | PathLike[str], overrides: Sequence[str] = ()) -> Planned:
    """Read a model file; overrides may change the other settings that decide its plan. Raises ConfigError.

    Settings that are not in the file are a run's defaults, except ``mode: auto``, bfloat16, full recomputation, large
    encode batches.
    """
    file = read_model_file(expanded(path))
    workload, encoder = file.workload, {"config": {}, "max_batch_patches": MODEL_FILE_BATCH_PATCHES}
    values = {
        "name": file.name,
        "mode": "auto",
        "model": {"dtype": "bfloat16"},
        "encoders": dict.fromkeys(file.model.encoders, encoder),
        "backbone": {"config": {}, "activation_checkpointing": "full"},
        "data": {"sources": [{"path": str(path)}], "max_seq_len": int(workload.lengths.max())},
        "training": {"global_batch_size": workload.global_batch_size, "max_steps": 1},
        "scheduler": {"microbatch_tokens": workload.microbatch_tokens},
    }
    try:
        base = RunConfig.model_validate(values)
    except ValidationError as error:  # a name or a size that no run takes
        raise refused(Document(str(path), values), error) from error
    for text in overrides:
        if not _MODEL_FILE_KEYS.fullmatch(text.partition("=")[0].strip()):
            override_config(base, [text], check_paths=False)  # refuses an unknown key, with the nearest
            raise ConfigError(
                f"override {text!r}: for a model file only settings that decide its plan can be overridden, e.g. "
                f"scheduler.microbatch_tokens or backbone.activation_checkpointing; change {path} itself"
            )
    config = with_kept_choices(override_config(base, overrides, check_paths=False), overrides)
    workload = replace(
        workload,
        global_batch_size=config.training.global_batch_size,
        microbatch_tokens=config.scheduler.microbatch_tokens,
        freeze=config.frozen_modules,
    )
    patterns = [key for key in config.model.freeze if is_pattern(key)]
    if patterns:
        raise ConfigError(
            f"model.freeze ({', '.join(patterns)}): {path} has no parameters' names; name modules (connector, backbone)"
        )
    model = with_frozen_modules(file.model, config.frozen_modules, trains_encoders=config.trains_encoders)
    keys = {text.partition("=")[0].strip() for text in overrides}
    own = frozenset(name for name in config.encoders if f"encoders.{name}.segment_nbytes" in keys)
    return Planned(config, model, workload, f"model file {file.name}", num_devices=None, own_segments=own)
