"""Which cost a run plans with: from its configuration, and from a profile if the configuration names one."""

from __future__ import annotations

from typing import Any

from flowtrain.config.run import RunConfig
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.scheduler.cost import eq3, make_cost_model
from flowtrain.scheduler.cost_profile import CostProfile, read_cost_profile
from flowtrain.types.plan import CostModel


def is_refitted(config: RunConfig) -> bool:
    """Whether the run's cost is fitted again while it runs; otherwise it is frozen."""
    return config.scheduler.cost == "profile" and config.data.order == "arrival"


def configured_profile(config: RunConfig, spec: ModelSpec) -> CostProfile | None:
    """Read the profile that the run plans with; None if it needs or has none.

    Raises ConfigError if the file cannot be read or was measured on another model.
    """
    scheduler = config.scheduler
    if scheduler.cost != "profile" or scheduler.cost_profile is None:
        return None
    profile = read_cost_profile(scheduler.cost_profile)
    profile.check_model(profiled_model(config, spec), scheduler.microbatch_tokens)
    return profile


def first_cost(config: RunConfig, spec: ModelSpec, profile: CostProfile | None = None) -> CostModel:
    """Return the cost of a run's first step; profile: the result of ``configured_profile``.

    A run that fits its costs while it runs starts with Eq. 3 if it has no profile. Raises ConfigError if a frozen cost
    needs a profile and there is none.
    """
    scheduler = config.scheduler
    if profile is None and is_refitted(config):
        return eq3(scheduler.microbatch_tokens)
    fitted = profile.fitted.model if profile is not None else None
    return make_cost_model(
        scheduler.cost, scheduler.microbatch_tokens, spec.backbone, config.frozen_modules, profile=fitted
    )


def cost_label(config: RunConfig, cost: CostModel) -> str:
    """Return the name, for messages, of the cost that a run's first steps are planned with."""
    is_stand_in = cost.name != config.scheduler.cost and is_refitted(config)
    return f"{cost.name} (until the run has fitted its own)" if is_stand_in else config.scheduler.cost


def profiled_model(config: RunConfig, spec: ModelSpec) -> dict[str, Any]:
    """Return the settings, except the device, that decide the proportions of a microbatch's cost, as plain values.

    Recomputation, threads and DP ranks are not included: they scale linear and quadratic work by similar factors.
    """
    return {
        "backbone": spec.shapes()["backbone"],
        "freeze": sorted(config.model.freeze),
        "dtype": config.model.dtype,
        "attention": config.backbone.attention,
    }
