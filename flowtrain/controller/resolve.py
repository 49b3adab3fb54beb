"""From what a user gives to what starts: a configuration, overrides, and a plan that is given, saved or still open."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike

from flowtrain.allocator.plan import read_plan
from flowtrain.config.emulated import check_resumes
from flowtrain.config.kept_choices import with_kept_choices
from flowtrain.config.load import load_config, override_config, plain_values
from flowtrain.config.run import RunConfig
from flowtrain.config.startable import check_startable
from flowtrain.config.yaml_text import dotted
from flowtrain.errors import ConfigError, FaultCode
from flowtrain.observability.run_dir import run_dir
from flowtrain.types.run_plan import Plan

logger = logging.getLogger(__name__)

ConfigLike = RunConfig | str | PathLike[str]
PlanLike = Plan | str | PathLike[str]


@dataclass(frozen=True)
class Start:
    """What is to start."""

    given: ConfigLike
    overrides: Sequence[str]
    config: RunConfig
    """With overrides and the plan applied."""
    plan: Plan | None
    """None: there is none, or it is still to be made."""

    @property
    def is_open(self) -> bool:
        """Whether a plan has to be made."""
        return self.config.mode == "auto"

    def decided(self, plan: Plan) -> RunConfig:
        """Return the configuration with the plan that was made for it.

        Raises ConfigError if an override contradicts the plan; overrides of resources win over it.
        """
        decided = resolve(self.given, self.overrides, plan=plan)
        _check_follows(decided, plan, "the plan of mode 'auto'")
        return decided


def start_of(
    config: ConfigLike,
    overrides: Sequence[str],
    resume: bool,
    plan: PlanLike | None,
    devices: int | None = None,
) -> Start:
    """Return what is to start: with the given plan, or with that of the run that goes on; raises ConfigError.

    devices: the option, which only a plan that is still to be made can take.
    """
    found = plan if plan is None or isinstance(plan, Plan) else read_plan(plan)
    resolved = resolve(config, overrides, plan=plan)
    check_resumes(resolved, resume)
    if resolved.mode == "auto" and resume and (saved := run_dir(resolved).plan).is_file():
        found = read_plan(saved)
        logger.warning("mode is auto, and %s decides for a run that goes on: mode %s", saved, found.mode)
        resolved = resolve(config, overrides, plan=saved)
        _check_follows(resolved, found, f"{saved}, which mode 'auto' goes on with,")
    if devices is not None and resolved.mode != "auto":
        raise ConfigError(
            f"--devices ({devices}) is for a plan that mode 'auto' makes, and the mode is {resolved.mode!r}"
            f"{'' if found is None else ' by a plan that is there already'}; leave it out"
        )
    return Start(config, overrides, with_kept_choices(resolved, overrides), found)


def _check_follows(config: RunConfig, plan: Plan, whose: str) -> None:
    """Raise ConfigError if a configuration has other degrees or settings than the plan; resources may differ."""
    values = plain_values(config)
    resources = ("num_cpus", "num_devices", "accelerator_type", "segment_nbytes", "feeder_segment_nbytes")
    for key, wanted in plan.settings().items():
        found = values
        for name in key:
            found = found[name]
        if found != wanted and key[-1] not in (*resources, "num_feeders", "network"):
            text = (
                f"an override sets {dotted(key)} to {found!r}, and {whose} has {wanted!r}; leave it out, or set "
                f"mode={plan.mode}: then degrees and settings are those of the configuration"
            )
            raise ConfigError.of(dotted(key), FaultCode.CONFLICT, text)


def resolve(
    config: ConfigLike, overrides: Sequence[str] = (), check_paths: bool = True, *, plan: PlanLike | None = None
) -> RunConfig:
    """Return the configuration with overrides applied; raises ConfigError. check_paths: data and models must exist.

    plan: sets mode, degrees and resources, as in ``flowtrain.train``.
    """
    if plan is None:
        return _resolved(config, overrides, check_paths)
    chosen, name = (plan, "given") if isinstance(plan, Plan) else (read_plan(plan), str(plan))
    try:
        return _resolved(config, overrides, check_paths, chosen)
    except ConfigError as error:
        own = _refusal(config, overrides, check_paths)
        if own is not None and (not own.faults or set(own.faults) & set(error.faults)):
            raise own from None  # a fault that is there without the plan too is not the plan's
        raise ConfigError(f"with the plan {name}: {error}", error.faults) from error


def _resolved(config: ConfigLike, overrides: Sequence[str], check_paths: bool, chosen: Plan | None = None) -> RunConfig:
    if isinstance(config, RunConfig):
        resolved = override_config(config, overrides, check_paths, chosen)
    else:
        resolved = _loaded(config, overrides, check_paths, chosen)
    check_startable(resolved)
    return resolved


def _refusal(config: ConfigLike, overrides: Sequence[str], check_paths: bool) -> ConfigError | None:
    try:
        _resolved(config, overrides, check_paths)
    except ConfigError as error:
        return error
    return None


def _loaded(path: str | PathLike[str], overrides: Sequence[str], check_paths: bool, chosen: Plan | None) -> RunConfig:
    try:
        return load_config(path, overrides, check_paths, chosen)
    except ConfigError as error:
        from flowtrain.controller.planning.planned import is_model_file

        if not is_model_file(path):
            raise
        raise ConfigError(
            f"{path} is a model file, which only flowtrain plan takes; give a run's configuration, such as "
            "configs/quickstart.yaml"
        ) from error
