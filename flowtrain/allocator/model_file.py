"""Model specifications under ``configs/models``: shapes as HF configurations, and a workload to plan with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, ValidationError, model_validator

from flowtrain.allocator.mixture import Column, Mixture, image_tokens
from flowtrain.config.base import ConfigModel
from flowtrain.config.yaml_text import YamlError, dotted, parse_yaml
from flowtrain.costs.flops import IntArray
from flowtrain.costs.hf_config import from_hf_text_config, from_hf_vision_config
from flowtrain.costs.model_spec import ConnectorSpec, ModelSpec
from flowtrain.costs.workload import Workload
from flowtrain.errors import ConfigError

MODEL_FILE_SCHEMA = 1

_Columns = tuple[IntArray, IntArray | None, dict[str, Column]]
"""Text tokens, tokens that carry loss (None: all of the sample) and images by encoder, of each sample."""


class _Sample(ConfigModel):
    """One representative sample; images: by encoder, patches of each image."""

    text_tokens: int = Field(ge=1)
    target_tokens: int = Field(ge=0)
    images: dict[str, list[int]] = Field(default_factory=dict)


class _WorkloadSection(ConfigModel):
    global_batch_size: int = Field(ge=1)
    microbatch_tokens: int = Field(ge=1)
    fill: float = Field(1.0, gt=0, le=1)
    samples: list[_Sample] | None = Field(None, min_length=1)
    mixture: Mixture | None = None

    @model_validator(mode="after")
    def _has_samples(self) -> _WorkloadSection:
        if (self.samples is None) == (self.mixture is None):
            given = "both" if self.samples is not None else "neither"
            raise ValueError(
                f"has {given} of samples and mixture; give samples, or the mixture that they are drawn from"
            )
        return self


class _ModelFile(ConfigModel):
    """encoders, backbone: HF configurations, as ``encoders.<name>.config`` and ``backbone.config`` of a run.

    patches_per_token: by encoder, patches whose features side by side are one token; 1 if not given.
    """

    schema_number: Literal[1] = Field(alias="schema")
    name: str
    encoders: dict[str, dict[str, Any]] = Field(min_length=1)
    backbone: dict[str, Any]
    patches_per_token: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
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
        model = _model(values)
        return ModelFile(values.name, model, _workload(values, model))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _model(values: _ModelFile) -> ModelSpec:
    if unknown := sorted(set(values.patches_per_token) - set(values.encoders)):
        raise ConfigError(f"patches_per_token names encoders {unknown}; encoders has {sorted(values.encoders)}")
    encoders = {
        name: replace(from_hf_vision_config(config), patches_per_row=values.patches_per_token.get(name, 1))
        for name, config in values.encoders.items()
    }
    backbone = from_hf_text_config(values.backbone)
    # Feature rows of several encoders share one sequence; the widest encoder sets the connector's input width.
    width = max(encoder.hidden_size * encoder.patches_per_row for encoder in encoders.values())
    return ModelSpec(encoders, ConnectorSpec(width, backbone.hidden_size, backbone.hidden_size), backbone)


def _workload(values: _ModelFile, model: ModelSpec) -> Workload:
    section = values.workload
    text, targets, images = _listed(section.samples or [], values) if section.mixture is None else _drawn(values, model)
    vision = image_tokens(images, values.patches_per_token)
    return Workload(
        global_batch_size=section.global_batch_size,
        microbatch_tokens=section.microbatch_tokens,
        lengths=vision + text,
        vision_lengths=vision,
        target_lengths=targets if targets is not None else vision + text,
        images=images,
        fill=section.fill,
    )


def _listed(samples: Sequence[_Sample], values: _ModelFile) -> _Columns:
    for sample in samples:
        _check_encoders("samples", sample.images, values)
    images = {
        name: (
            _column([len(sample.images.get(name, ())) for sample in samples]),
            _column([sum(sample.images.get(name, ())) for sample in samples]),
        )
        for name in values.encoders
    }
    text, targets = (_column([getattr(each, key) for each in samples]) for key in ("text_tokens", "target_tokens"))
    return text, targets, images


def _drawn(values: _ModelFile, model: ModelSpec) -> _Columns:
    section, mixture = values.workload, values.workload.mixture
    assert mixture is not None
    for component in mixture.components:
        _check_encoders("mixture", component.images, values)
    sizes = {name: spec.patch_size for name, spec in model.encoders.items()}
    text, images = mixture.draw(section.microbatch_tokens, sizes, values.patches_per_token)
    return text, text if mixture.loss == "text" else None, images


def _check_encoders(key: str, images: Mapping[str, object], values: _ModelFile) -> None:
    if unknown := sorted(set(images) - set(values.encoders)):
        raise ConfigError(f"workload.{key} names encoders {unknown}; encoders has {sorted(values.encoders)}")


def _column(values: list[int]) -> IntArray:
    return np.array(values, dtype=np.int64)
