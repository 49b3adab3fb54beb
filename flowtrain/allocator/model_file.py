"""Model specifications under ``configs/models``: shapes as HF configurations, and a workload to plan with."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, ValidationError

from flowtrain.config.base import ConfigModel
from flowtrain.config.yaml_text import YamlError, dotted, parse_yaml
from flowtrain.costs.flops import IntArray
from flowtrain.costs.hf_config import from_hf_text_config, from_hf_vision_config
from flowtrain.costs.model_spec import ConnectorSpec, ModelSpec
from flowtrain.costs.workload import Workload
from flowtrain.errors import ConfigError

MODEL_FILE_SCHEMA = 1


class _Sample(ConfigModel):
    """One representative sample; images: by encoder, patches of each image. An image has one token per patch."""

    text_tokens: int = Field(ge=1)
    target_tokens: int = Field(ge=0)
    images: dict[str, list[int]] = Field(default_factory=dict)


class _WorkloadSection(ConfigModel):
    global_batch_size: int = Field(ge=1)
    microbatch_tokens: int = Field(ge=1)
    fill: float = Field(1.0, gt=0, le=1)
    samples: list[_Sample] = Field(min_length=1)


class _ModelFile(ConfigModel):
    """encoders, backbone: HF configurations, as ``encoders.<name>.config`` and ``backbone.config`` of a run."""

    schema_number: Literal[1] = Field(alias="schema")
    name: str
    encoders: dict[str, dict[str, Any]] = Field(min_length=1)
    backbone: dict[str, Any]
    workload: _WorkloadSection


@dataclass(frozen=True, slots=True)
class ModelFile:
    """The shapes and the workload of one model file."""

    name: str
    model: ModelSpec
    workload: Workload


def read_model_file(path: str | PathLike[str]) -> ModelFile:
    """Read a file of ``configs/models``; ConfigError names every fault."""
    try:
        values = _ModelFile.model_validate(parse_yaml(Path(path).read_text(encoding="utf-8"))[0])
    except ValidationError as error:
        faults = [f"{dotted(fault['loc'])}: {fault['msg']}" for fault in error.errors()]
        raise ConfigError(f"{path}: {'; '.join(faults)}") from error
    except (OSError, YamlError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    try:
        return ModelFile(values.name, _model(values), _workload(values))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _model(values: _ModelFile) -> ModelSpec:
    encoders = {name: from_hf_vision_config(config) for name, config in values.encoders.items()}
    backbone = from_hf_text_config(values.backbone)
    # Feature rows of several encoders share one sequence; the widest encoder sets the connector's input width.
    width = max(encoder.hidden_size for encoder in encoders.values())
    return ModelSpec(encoders, ConnectorSpec(width, backbone.hidden_size, backbone.hidden_size), backbone)


def _workload(values: _ModelFile) -> Workload:
    samples = values.workload.samples
    for sample in samples:
        if unknown := sorted(set(sample.images) - set(values.encoders)):
            raise ConfigError(f"workload.samples names encoders {unknown}; encoders has {sorted(values.encoders)}")
    images = {
        name: (
            _column([len(sample.images.get(name, ())) for sample in samples]),
            _column([sum(sample.images.get(name, ())) for sample in samples]),
        )
        for name in values.encoders
    }
    vision = _column([sum(map(sum, sample.images.values())) for sample in samples])
    return Workload(
        global_batch_size=values.workload.global_batch_size,
        microbatch_tokens=values.workload.microbatch_tokens,
        lengths=vision + _column([sample.text_tokens for sample in samples]),
        vision_lengths=vision,
        target_lengths=_column([sample.target_tokens for sample in samples]),
        images=images,
        fill=values.workload.fill,
    )


def _column(values: list[int]) -> IntArray:
    return np.array(values, dtype=np.int64)
