"""The plan of a run: how many actors each module gets, with which parallelism and which resources."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from flowtrain.config.messages import Document, render_validation
from flowtrain.config.run import RunConfig
from flowtrain.config.yaml_text import Path as KeyPath
from flowtrain.config.yaml_text import YamlError, dump_yaml, parse_yaml
from flowtrain.errors import ConfigError
from flowtrain.types.plan import PLAN_SCHEMA, Degrees

_Degree = Annotated[int, Field(ge=1)]
_Amount = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """Parallel degrees of one module and what each of its actors takes.

    num_cpus, num_devices: reserved for each actor; fractions are allowed. accelerator_type: of these devices, as Ray
    calls it; None for any. segment_nbytes: what each data parallel
    replica gives to the memory pool, in bytes; the first of its actors has it.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    data_parallel_size: _Degree = 1
    tensor_parallel_size: _Degree = 1
    pipeline_parallel_size: _Degree = 1
    num_cpus: _Amount = 0.0
    num_devices: _Amount = 0.0
    segment_nbytes: Annotated[int, Field(ge=0)] = 0
    accelerator_type: str | None = None

    @property
    def degrees(self) -> Degrees:
        """The three degrees together."""
        return Degrees(self.data_parallel_size, self.pipeline_parallel_size, self.tensor_parallel_size)

    @property
    def num_actors(self) -> int:
        """Actors of this module, one per rank of all its replicas."""
        return self.degrees.world_size


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole run's plan, as saved in ``plan.yaml``; ``encoders`` by name, in the configuration's order."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    encoders: dict[str, ModulePlan]
    backbone: ModulePlan
    feeder: ModulePlan
    schema: int = PLAN_SCHEMA

    @property
    def is_shared(self) -> bool:
        """Whether all encoders and the backbone take turns on one accelerator."""
        actors = [*self.encoders.values(), self.backbone]
        shares = [each.num_devices for each in actors]
        return all(each.num_actors == 1 for each in actors) and min(shares) > 0.0 and sum(shares) <= 1.0

    def modules(self) -> Iterator[tuple[str, ModulePlan]]:
        """Iterate over (name, plan) of all modules: encoders, backbone, feeder."""
        yield from self.encoders.items()
        yield "backbone", self.backbone
        yield "feeder", self.feeder


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a plan takes in all. num_actors includes the coordinator; pool_nbytes: all segments of the memory pool."""

    num_actors: int
    num_cpus: float
    num_devices: float
    pool_nbytes: int


def fixed_plan(config: RunConfig, use_devices: bool = False) -> Plan:
    """Return the plan that the configuration's explicit degrees spell out.

    use_devices: encoder and backbone actors take their accelerator each, or their share of one, unless
    ``model.device`` is ``cpu``.
    """
    takes_devices = use_devices and config.model.device != "cpu"
    encoders = {
        name: ModulePlan(
            data_parallel_size=encoder.data_parallel_size,
            tensor_parallel_size=encoder.tensor_parallel_size,
            num_cpus=encoder.num_cpus,
            num_devices=encoder.num_devices if takes_devices else 0.0,
            segment_nbytes=encoder.segment_nbytes,
            accelerator_type=encoder.accelerator_type,
        )
        for name, encoder in config.encoders.items()
    }
    backbone = ModulePlan(
        data_parallel_size=config.backbone.data_parallel_size,
        tensor_parallel_size=config.backbone.tensor_parallel_size,
        pipeline_parallel_size=config.backbone.pipeline_parallel_size,
        num_cpus=config.backbone.num_cpus,
        num_devices=config.backbone.num_devices if takes_devices else 0.0,
        accelerator_type=config.backbone.accelerator_type,
    )
    # The feeder reserves no CPU: it runs ahead of everybody and yields, and small machines have none to spare.
    return Plan(encoders, backbone, feeder=ModulePlan(segment_nbytes=config.pool.text_segment_nbytes))


def requirements(plan: Plan) -> Requirements:
    """Return what the plan takes in all, to be held against what the cluster has before anything starts."""
    modules = [module for _, module in plan.modules()]
    return Requirements(
        num_actors=1 + sum(module.num_actors for module in modules),
        num_cpus=_exact(sum(module.num_actors * module.num_cpus for module in modules)),
        num_devices=_exact(sum(module.num_actors * module.num_devices for module in modules)),
        pool_nbytes=sum(module.data_parallel_size * module.segment_nbytes for module in modules),
    )


def degree_overrides(plan: Plan) -> tuple[str, ...]:
    """Return the plan's parallel degrees as changes to a configuration."""
    found = []
    for key, module in _configured(plan):
        for axis, degree in (
            ("data", module.data_parallel_size),
            ("tensor", module.tensor_parallel_size),
            ("pipeline", module.pipeline_parallel_size),
        ):
            if key == "backbone" or axis != "pipeline" or degree > 1:  # an encoder has no such axis
                found.append(f"{key}.{axis}_parallel_size={degree}")
    return tuple(found)


def plan_overrides(plan: Plan) -> tuple[str, ...]:
    """Return all that a configuration says of a plan, as changes to it.

    Whether actors take devices is not among it: a run looks whether its cluster has some; but which, and how much of
    one.
    """
    resources = [f"{key}.num_cpus={module.num_cpus!r}" for key, module in _configured(plan)]
    for key, module in _configured(plan):
        if module.num_devices:
            resources.append(f"{key}.num_devices={module.num_devices!r}")
        if module.accelerator_type is not None:
            resources.append(f"{key}.accelerator_type={module.accelerator_type}")
    resources += [f"encoders.{name}.segment_nbytes={each.segment_nbytes}" for name, each in plan.encoders.items()]
    return (*degree_overrides(plan), *resources, f"pool.text_segment_nbytes={plan.feeder.segment_nbytes}")


def plan_changes(config: RunConfig, plan: Plan) -> tuple[str, ...]:
    """Return the plan's degrees, and what else of it differs from a configuration, as changes to that."""
    usual = set(plan_overrides(fixed_plan(config, use_devices=True)))
    degrees = degree_overrides(plan)
    return (*degrees, *(each for each in plan_overrides(plan) if each not in usual and each not in degrees))


def to_yaml(plan: Plan) -> str:
    """Return the plan as YAML text that ``from_yaml`` reads back to an equal plan."""
    return dump_yaml(asdict(plan))


def from_yaml(text: str, label: str = "plan.yaml") -> Plan:
    """Return the plan in a YAML text; ConfigError names every fault. label: the file, as messages call it."""
    try:
        values: Any = parse_yaml(text)[0]
        # The schema decides how the rest is read, so it is looked at first.
        found = values.get("schema") if isinstance(values, dict) else None
        if found != PLAN_SCHEMA:
            raise ConfigError(
                f"{label}: schema ({found!r}) is not the one that this version reads ({PLAN_SCHEMA}); make a new plan"
            )
        if not {"encoders", "backbone", "feeder"} <= values.keys():
            raise ConfigError(
                f"{label}: this is no plan, which has encoders, backbone and feeder; make one by flowtrain plan CONFIG "
                "--save"
            )
        return TypeAdapter(Plan).validate_python(values)
    except YamlError as error:
        raise ConfigError(f"{label}: {error}") from error
    except ValidationError as error:
        raise ConfigError(render_validation(Document(label, values, nearest=_nearest_key), error)) from error


def _nearest_key(path: KeyPath, values: Any) -> str | None:
    *section, name = map(str, path)
    known = [each.name for each in fields(ModulePlan if section else Plan)]
    near = difflib.get_close_matches(name, known, n=1)
    return ".".join([*section, *near]) if near else None


def read_plan(path: str | PathLike[str]) -> Plan:
    """Return the plan in a file; ConfigError where it cannot be read."""
    try:
        return from_yaml(Path(path).expanduser().read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the plan cannot be read: {error}") from error


def _configured(plan: Plan) -> Iterator[tuple[str, ModulePlan]]:
    """Modules with a section of their own in the configuration, by its key."""
    yield from ((f"encoders.{name}", module) for name, module in plan.encoders.items())
    yield "backbone", plan.backbone


def _exact(amount: float) -> float:
    """Drop the noise of adding fractions: Ray counts resources in ten-thousandths."""
    return round(amount, 4)
