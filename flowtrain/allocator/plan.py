"""The plan that a configuration's degrees give, the resources of a plan, and its YAML."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import reduce
from operator import getitem
from os import PathLike
from typing import Any

from pydantic import TypeAdapter, ValidationError

from flowtrain.config.home import expanded
from flowtrain.config.messages import Document, refused
from flowtrain.config.modes import colocated_shares
from flowtrain.config.run import RunConfig
from flowtrain.config.yaml_text import Path as KeyPath
from flowtrain.config.yaml_text import YamlError, dotted, dump_yaml, parse_yaml
from flowtrain.errors import ConfigError
from flowtrain.types.plan import PLAN_SCHEMA
from flowtrain.types.run_plan import BackboneSettings, Key, ModulePlan, Plan

FEEDER_RATE = 400.0
"""Samples/s that a plan counts on from a feeder (benchmarks/feeding.py measures more on one core)."""


@dataclass(frozen=True, slots=True)
class Requirements:
    """All resources of a plan. num_actors: with the coordinator; pool_nbytes: all segments of the memory pool."""

    num_actors: int
    num_cpus: float
    num_devices: float
    pool_nbytes: int


def fixed_plan(config: RunConfig) -> Plan:
    """Return the plan that the configuration's explicit degrees give.

    Each encoder and backbone actor takes an accelerator, or its share of one, unless ``model.device`` says otherwise.
    For a cluster without accelerators see ``Plan.without_devices``. Modes without encoder actors have no encoders in
    it. With ``mode: auto`` it is that of ``RunConfig.settled``.
    """
    mode = config.settled_mode
    is_colocated = mode == "colocated"
    shares, backbone_share = colocated_shares(config)
    encoders = {
        name: ModulePlan(
            data_parallel_size=config.encoder_replicas(name),
            tensor_parallel_size=encoder.tensor_parallel_size,
            num_cpus=encoder.num_cpus,
            num_devices=shares[name] if is_colocated else encoder.num_devices,
            segment_nbytes=encoder.segment_nbytes,
            accelerator_type=config.backbone.accelerator_type if is_colocated else encoder.accelerator_type,
        )
        for name, encoder in config.encoders.items()
        if config.has_encoder_actors
    }
    backbone = ModulePlan(
        data_parallel_size=config.backbone.data_parallel_size,
        tensor_parallel_size=config.backbone.tensor_parallel_size,
        pipeline_parallel_size=config.backbone.pipeline_parallel_size,
        num_cpus=config.backbone.num_cpus,
        num_devices=backbone_share if is_colocated else config.backbone.num_devices,
        accelerator_type=config.backbone.accelerator_type,
    )
    # A feeder reserves no CPU: it runs ahead of all others and yields, and small machines have none to spare.
    feeder = ModulePlan(
        data_parallel_size=config.data.num_feeders or 1, segment_nbytes=config.pool.feeder_segment_nbytes or 0
    )
    reduction = config.backbone.gradient_reduction
    plan = Plan(
        encoders,
        backbone,
        feeder,
        gradient_reduction=None if reduction == "auto" else reduction,
        hybrid_shard_size=config.backbone.hybrid_shard_size,
        mode=mode,
        emulated=config.emulation.device if config.emulation is not None else None,
    )
    if config.emulation is not None:
        return _bare(plan)
    return plan.without_devices() if config.model.device == "cpu" else plan


def _bare(plan: Plan) -> Plan:
    """The plan as it takes no CPUs and devices: emulated devices are not there, and their actors wait."""

    def bare(module: ModulePlan) -> ModulePlan:
        return replace(module, num_cpus=0.0, num_devices=0.0, accelerator_type=None)

    encoders = {name: bare(module) for name, module in plan.encoders.items()}
    return replace(plan, encoders=encoders, backbone=bare(plan.backbone))


def with_settings_of(config: RunConfig, plan: Plan, chosen: Plan | None) -> Plan:
    """Return the plan with the settings that ``chosen`` has, as the configuration has them: overrides may differ."""
    if chosen is not None and chosen.backbone_settings is not None:
        plan = replace(plan, backbone_settings=configured_settings(config))
    if chosen is not None and chosen.encoder_layers is not None:
        plan = replace(plan, encoder_layers=config.pipeline.encoder_layers)
    return plan


def configured_settings(config: RunConfig) -> BackboneSettings:
    """Return the settings of the backbone that a plan may choose, as configured."""
    backbone, words = config.backbone, config.backbone.activation_checkpointing
    return BackboneSettings(
        microbatch_tokens=config.scheduler.microbatch_tokens,
        activation_checkpointing=None
        if not isinstance(words, str) or words == "every_n" or words == "adaptive"
        else words,
        chunks=config.pipeline.chunks,
        sharding=None if backbone.sharding == "auto" else backbone.sharding,
    )


def feeders_needed(rate: float) -> int:
    """Return the feeders that read so many samples/s."""
    return max(1, math.ceil(rate / FEEDER_RATE))


def feeders_for(rate: float, num_devices: int) -> int:
    """Return the feeders that a rate in samples/s needs, at most one for each device.

    For a very small model, data sheets promise rates at which no node could decode images for its devices.
    """
    return min(feeders_needed(rate), num_devices)


def requirements(plan: Plan) -> Requirements:
    """Return all resources of a plan, to compare with the cluster's before anything starts."""
    modules = [module for _, module in plan.modules()]
    return Requirements(
        num_actors=1 + sum(module.num_actors for module in modules),
        num_cpus=_exact(sum(module.num_actors * module.num_cpus for module in modules)),
        num_devices=_exact(sum(module.num_actors * module.num_devices for module in modules)),
        pool_nbytes=sum(module.data_parallel_size * module.segment_nbytes for module in modules),
    )


def plan_overrides(plan: Plan) -> tuple[str, ...]:
    """Return all settings of a plan as overrides, as a user would write them on the command line."""
    return _written(plan.settings())


def changed_overrides(plan: Plan, config: RunConfig, also: Collection[str] = ()) -> tuple[str, ...]:
    """Return the plan's mode and degrees, and its other settings that ``config`` has otherwise, as overrides.

    With them the configuration equals ``config.with_plan(plan)``. also: dotted keys to name in any case.
    """
    always, values = {*plan.degree_settings(), ("mode",)}, config.model_dump()

    def is_named(key: Key, value: int | float | str) -> bool:
        return key in always or dotted(key) in also or reduce(getitem, key, values) != value

    return _written({key: value for key, value in plan.settings().items() if is_named(key, value)})


def changed_degrees(plan: Plan, config: RunConfig) -> tuple[str, ...]:
    """Return the plan's degrees of the backbone that ``config`` has otherwise, as overrides."""
    values = config.backbone.model_dump()
    degrees = {key: value for key, value in plan.degree_settings().items() if key[0] == "backbone"}
    return _written({key: value for key, value in degrees.items() if values[key[1]] != value})


def to_yaml(plan: Plan) -> str:
    """Return the plan as YAML text that ``from_yaml`` reads back to an equal plan."""
    return dump_yaml(asdict(plan))


def from_yaml(text: str, label: str = "plan.yaml") -> Plan:
    """Return the plan in a YAML text; ConfigError names every fault. label: the file's name in messages."""
    try:
        values: Any = parse_yaml(text)[0]
        # The schema decides how the rest is read, so it is checked first.
        found = values.get("schema") if isinstance(values, dict) else None
        if found != PLAN_SCHEMA:
            raise ConfigError(
                f"{label}: schema ({found!r}) is not the one that this version reads ({PLAN_SCHEMA}); create a new plan"
            )
        if not {"encoders", "backbone", "feeder"} <= values.keys():
            raise ConfigError(
                f"{label}: this is not a plan, which has encoders, backbone and feeder; create one with flowtrain plan "
                "CONFIG --save"
            )
        return TypeAdapter(Plan).validate_python(values)
    except YamlError as error:
        raise ConfigError(f"{label}: {error}") from error
    except ValidationError as error:
        raise refused(Document(label, values, nearest=_nearest_key), error) from error


def _nearest_key(path: KeyPath, values: Any) -> str | None:
    *section, name = map(str, path)
    known = [each.name for each in fields(ModulePlan if section else Plan)]
    near = difflib.get_close_matches(name, known, n=1)
    return ".".join([*section, *near]) if near else None


def read_plan(path: str | PathLike[str]) -> Plan:
    """Return the plan in a file; ConfigError if it cannot be read."""
    try:
        return from_yaml(expanded(path).read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the plan cannot be read: {error}") from error


def _written(settings: Mapping[Key, int | float | str]) -> tuple[str, ...]:
    return tuple(f"{dotted(key)}={value}" for key, value in settings.items())


def _exact(amount: float) -> float:
    """Round off the noise of adding fractions: Ray counts resources in ten-thousandths."""
    return round(amount, 4)
