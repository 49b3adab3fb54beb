"""The plan of a run: how many actors each module gets, with which parallelism and which resources."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from flowtrain.types.plan import PLAN_SCHEMA, Degrees

_Degree = Annotated[int, Field(ge=1)]
_Amount = Annotated[float, Field(ge=0)]

Mode = Literal["decoupled", "colocated", "monolithic", "disaggregated", "llm_only"]
"""How encoders and backbone share devices and time; docs/modes.md describes each."""

ModeChoice = Literal[Mode, "auto"]
"""``auto``: the mode that the planner predicts to be the fastest."""

ENCODER_MODES: frozenset[Mode] = frozenset({"decoupled", "colocated", "disaggregated"})
"""Modes in which actors of their own run the encoders."""

EncoderPlace = Literal["first", "mixed", "own"]
"""Where ``mode: monolithic`` has the encoder's layers."""

Key = tuple[str, ...]
"""A key of the configuration, as ``("backbone", "num_cpus")``."""


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """Parallel degrees of one module and what each of its actors takes."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    data_parallel_size: _Degree = 1
    tensor_parallel_size: _Degree = 1
    pipeline_parallel_size: _Degree = 1
    num_cpus: _Amount = 0.0
    """Reserved for each actor; fractions are allowed."""
    num_devices: _Amount = 0.0
    """Accelerators reserved for each actor; fractions are allowed."""
    segment_nbytes: Annotated[int, Field(ge=0)] = 0
    """Bytes that each data parallel replica gives to the memory pool; the first of its actors has them."""
    accelerator_type: str | None = None
    """Type of its devices, as Ray calls it; None for any."""

    @property
    def degrees(self) -> Degrees:
        """The three degrees together."""
        return Degrees(self.data_parallel_size, self.pipeline_parallel_size, self.tensor_parallel_size)

    @property
    def num_actors(self) -> int:
        """Actors of this module, one per rank of all its replicas."""
        return self.degrees.world_size


@dataclass(frozen=True, slots=True)
class BackboneSettings:
    """What a plan may choose for the backbone besides its degrees; the keys of the configuration that it sets."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    microbatch_tokens: Annotated[int, Field(ge=8)]
    """``scheduler.microbatch_tokens``."""
    activation_checkpointing: Literal["none", "full", "selective", "offload"] | None
    """``backbone.activation_checkpointing``; None: as configured."""
    chunks: Annotated[int, Field(ge=1)]
    """``pipeline.chunks``; above 1 ``pipeline.schedule`` is ``interleaved_1f1b``."""
    sharding: Literal["full", "gradients", "hybrid"] | None
    """``backbone.sharding``; None: as configured."""

    def settings(self) -> dict[Key, int | float | str]:
        """Return the configuration's keys and their values."""
        found: dict[Key, int | float | str] = {
            ("scheduler", "microbatch_tokens"): self.microbatch_tokens,
            ("pipeline", "chunks"): self.chunks,
            ("pipeline", "schedule"): "1f1b" if self.chunks == 1 else "interleaved_1f1b",
        }
        if self.activation_checkpointing is not None:
            found["backbone", "activation_checkpointing"] = self.activation_checkpointing
        if self.sharding is not None:
            found["backbone", "sharding"] = self.sharding
        return found


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole run's plan, as saved in ``plan.yaml``."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    encoders: dict[str, ModulePlan]
    """By name, in the configuration's order; empty in modes without encoder actors."""
    backbone: ModulePlan
    feeder: ModulePlan
    """A segment of 0 bytes: as large as the run's data need."""
    network: Literal["none", "auto", "nixl"] | None = None
    """``pool.network``; None: as configured."""
    gradient_reduction: Literal["microbatch", "step"] | None = None
    """``backbone.gradient_reduction``; None: as configured."""
    hybrid_shard_size: Annotated[int, Field(ge=2)] | None = None
    """``backbone.hybrid_shard_size``; None: as configured."""
    mode: Mode = "decoupled"
    backbone_settings: BackboneSettings | None = None
    """None: as configured."""
    encoder_layers: EncoderPlace | None = None
    """``pipeline.encoder_layers``; None: as configured."""
    emulated: str | None = None
    """The device that is emulated (``emulated.device``); None: devices are real."""
    schema: int = PLAN_SCHEMA

    @property
    def is_shared(self) -> bool:
        """Whether all encoders and the backbone take turns on one accelerator."""
        actors = [*self.encoders.values(), self.backbone]
        shares = [each.num_devices for each in actors]
        is_alone = bool(self.encoders) and all(each.num_actors == 1 for each in actors)
        return is_alone and min(shares) > 0.0 and sum(shares) <= 1.0

    def modules(self) -> Iterator[tuple[str, ModulePlan]]:
        """Iterate over (name, plan) of all modules: encoders, backbone, feeder."""
        yield from self.encoders.items()
        yield "backbone", self.backbone
        yield "feeder", self.feeder

    def without_devices(self) -> Plan:
        """Return the plan as a cluster without accelerators starts it."""
        encoders = {name: replace(module, num_devices=0.0) for name, module in self.encoders.items()}
        return replace(self, encoders=encoders, backbone=replace(self.backbone, num_devices=0.0))

    def degree_settings(self) -> dict[Key, int]:
        """Return its parallel degrees, by the keys that a configuration has for them."""
        found = {}
        for section, module in self._sections():
            found[*section, "data_parallel_size"] = module.data_parallel_size
            found[*section, "tensor_parallel_size"] = module.tensor_parallel_size
            if section == ("backbone",) or module.pipeline_parallel_size > 1:  # an encoder has no such key
                found[*section, "pipeline_parallel_size"] = module.pipeline_parallel_size
        return found

    def settings(self) -> dict[Key, int | float | str]:
        """Return all that a configuration has of a plan, by key; degrees come first.

        Includes the type and share of devices; whether devices are used is decided at run time.
        """
        found: dict[Key, int | float | str] = dict(self.degree_settings())
        found["mode",] = self.mode
        for section, module in self._sections():
            found[*section, "num_cpus"] = module.num_cpus
        for section, module in self._sections():
            if module.num_devices:
                found[*section, "num_devices"] = module.num_devices
            if module.accelerator_type is not None:
                found[*section, "accelerator_type"] = module.accelerator_type
        for name, module in self.encoders.items():
            found["encoders", name, "segment_nbytes"] = module.segment_nbytes
        found["data", "num_feeders"] = self.feeder.data_parallel_size
        if self.feeder.segment_nbytes:
            found["pool", "feeder_segment_nbytes"] = self.feeder.segment_nbytes
        if self.network is not None:
            found["pool", "network"] = self.network
        if self.gradient_reduction is not None:
            found["backbone", "gradient_reduction"] = self.gradient_reduction
        if self.hybrid_shard_size is not None:
            found["backbone", "hybrid_shard_size"] = self.hybrid_shard_size
        if self.backbone_settings is not None:
            found |= self.backbone_settings.settings()
        if self.encoder_layers is not None:
            found["pipeline", "encoder_layers"] = self.encoder_layers
        return found

    def _sections(self) -> Iterator[tuple[Key, ModulePlan]]:
        """Modules that have a section of their own in the configuration."""
        yield from ((("encoders", name), module) for name, module in self.encoders.items())
        yield ("backbone",), self.backbone
