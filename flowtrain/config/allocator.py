"""How ``flowtrain plan`` divides the devices."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import field_validator

from flowtrain.config.base import ConfigModel, meant
from flowtrain.errors import ConfigError, FaultCode

AllocationMethod = Literal["milp", "even", "flops"]
PlannerChoice = Literal["activation_checkpointing", "microbatch_tokens", "chunks", "sharding", "gradient_reduction"]
PLANNER_CHOICES: tuple[PlannerChoice, ...] = get_args(PlannerChoice)
CHOICE_KEYS: dict[PlannerChoice, tuple[str, ...]] = {
    "activation_checkpointing": ("backbone.activation_checkpointing", "backbone.checkpoint_every"),
    "microbatch_tokens": ("scheduler.microbatch_tokens",),
    "chunks": ("pipeline.chunks", "pipeline.schedule"),
    "sharding": ("backbone.sharding", "backbone.hybrid_shard_size"),
    "gradient_reduction": ("backbone.gradient_reduction",),
}
"""Keys of the configuration that set what a plan may choose."""


class AllocatorConfig(ConfigModel):
    """``flowtrain plan``; a run reads it only with ``mode: auto`` and ``pipeline.policy: pipetune``."""

    method: AllocationMethod = "milp"
    """``milp`` matches production to consumption (docs/allocator.md). The others are for ablations: the backbone and
    all encoders together get a number of devices first, and then their best degrees for it. ``even``: half each.
    ``flops``: in proportion to their FLOPs for a sample."""
    choose: Literal["auto", "all"] | tuple[PlannerChoice, ...] = "auto"
    """Settings that a plan chooses besides the degrees; others stay as configured. ``auto``: all of them with ``mode:
    auto`` except those that overrides set, none with another mode. ``all``: all of them with any mode."""
    profile: str | None = None
    """A file that ``flowtrain profile`` wrote, for the rates of ``mode: auto`` and of ``flowtrain plan`` without
    ``--profile``, and for the search of ``pipeline.policy``; None: data sheets."""

    @field_validator("choose", mode="before")
    @classmethod
    def _auto_or_a_list(cls, value: Any) -> Any:
        """Name what is wrong; pydantic would name each of the two types."""
        key, names = "allocator.choose", ", ".join(PLANNER_CHOICES)
        if value in ("auto", "all"):
            return value
        if not isinstance(value, list | tuple):
            said = f"{key} = {value!r}: must be auto, all or a list of {names}"
            raise ConfigError.of(key, FaultCode.VALUE, said)
        for index, name in enumerate(value):
            if name not in PLANNER_CHOICES:
                said = f"{key}.{index} = {name!r}: a plan can choose {names}{meant(name, PLANNER_CHOICES)}"
                raise ConfigError.of(key, FaultCode.VALUE, said)
        return tuple(value)
