"""Which cost a run plans with: from its configuration, and from a profile if the configuration names one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from flowtrain.config.run import RunConfig
from flowtrain.costs.microbatch_costs import FIT_AGAIN, MicrobatchCosts
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.costs.profile import Profile, read_profile
from flowtrain.errors import ConfigError
from flowtrain.scheduler.cost import eq3, make_cost_model
from flowtrain.types.plan import CostModel

logger = logging.getLogger(__name__)


def is_refitted(config: RunConfig) -> bool:
    """Whether the run's cost is fitted again while it runs; otherwise it is frozen."""
    return config.scheduler.cost == "profile" and config.data.order == "arrival"


def configured_costs(config: RunConfig, spec: ModelSpec) -> Profile | None:
    """Read the profile that the run packs with; None if it needs or has none.

    Raises ConfigError if the file cannot be read, has no fitted cost, or was measured on another model.
    """
    scheduler = config.scheduler
    if scheduler.cost != "profile" or scheduler.cost_profile is None:
        return None
    profile = read_profile(scheduler.cost_profile)
    costs_of(profile).check(profile.source, profiled_model(config, spec), scheduler.microbatch_tokens)
    return profile


def read_microbatch_costs(path: str) -> MicrobatchCosts:
    """Read the fitted cost of a profile; ConfigError if there is none."""
    return costs_of(read_profile(path))


def costs_of(profile: Profile) -> MicrobatchCosts:
    """Return the fitted cost of a profile; ConfigError if it has none."""
    if profile.microbatches is None:
        raise ConfigError(
            f"{profile.source} has no fitted cost of microbatches (scheduler.cost_profile): flowtrain profile measures "
            f"none, a run does; {FIT_AGAIN}"
        )
    return profile.microbatches


def check_device(profile: Profile, device: str, versions: Mapping[str, str]) -> None:
    """Raise ConfigError if this run computes on another device; only warn about other library versions."""
    if device != profile.device:
        raise ConfigError(
            f"{profile.source}: device is {profile.device!r} there and {device!r} in this run, so its microbatches "
            f"have another cost; {FIT_AGAIN}"
        )
    for name, version in versions.items():
        if version != profile.versions.get(name):
            logger.warning(
                "%s was measured with %s %s, now %s: costs may differ a little",
                *(profile.source, name, profile.versions.get(name), version),
            )


def first_cost(config: RunConfig, spec: ModelSpec, profile: Profile | None = None) -> CostModel:
    """Return the cost of a run's first step; profile: the result of ``configured_costs``.

    A run that fits its costs while it runs starts with Eq. 3 if it has no profile. Raises ConfigError if a frozen cost
    needs a profile and there is none.
    """
    scheduler = config.scheduler
    if profile is None and is_refitted(config):
        return eq3(scheduler.microbatch_tokens)
    fitted = costs_of(profile).fitted.model if profile is not None else None
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
