"""Checks of a run on emulated devices, and what it says about itself. No Ray."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from flowtrain.config.run import RunConfig
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.costs.profile import read_profile
from flowtrain.emulation.process import BACKBONE, EmulatedRun
from flowtrain.errors import ConfigError, FaultCode

MOST_HOST_SHARE = 0.1
NO_WEIGHTS = "no weights exist: the loss is 0, and the run writes no checkpoint and has no export"


def check_emulated(config: RunConfig) -> None:
    """Raise ConfigError unless the table, or the profile, has the emulated devices."""
    if config.emulation is None:
        return
    run = EmulatedRun.of(config)
    for module in (BACKBONE, *_encoders(config)):
        try:
            run.device_type(module)
        except ConfigError as error:
            text = str(error).replace("--device", "emulated.device").replace("--profile FILE", "emulated.profile=FILE")
            raise ConfigError.of("emulated.device", FaultCode.VALUE, text) from error


def check_emulated_profile(config: RunConfig, model: ModelSpec) -> None:
    """Raise ConfigError if the profile of emulated devices is of another model; other settings may differ."""
    if config.emulation is None or config.emulation.profile is None:
        return
    profile, shapes = read_profile(config.emulation.profile), {**model.shapes(), "dtype": config.model.dtype}
    same = replace(profile, model={name: profile.model.get(name) for name in shapes})
    try:
        same.check(profile.device, shapes, profile.versions)
    except ConfigError as error:
        raise ConfigError.of("emulated.profile", FaultCode.VALUE, f"emulated.profile: {error}") from error


def emulation_note(config: RunConfig) -> str | None:
    """Return what is emulated, in words; None if nothing is."""
    settings = config.emulation
    if settings is None:
        return None
    run = EmulatedRun.of(config)
    names = [run.device_type(each).name for each in (BACKBONE, *_encoders(config))]
    times = "profile" if run.profile is not None else "data sheet"
    scale = "" if settings.time_scale == 1.0 else f", waits are {settings.time_scale:g} times as long"
    devices = " and ".join(dict.fromkeys(names))
    return f"emulated devices: {devices}, times by {times}{scale}; {NO_WEIGHTS}"


def host_warning(host_share: float | None) -> str | None:
    """Return a warning if this machine's own work is much of a step; host_share: of the wall time of the steps."""
    if host_share is None or host_share <= MOST_HOST_SHARE:
        return None
    return (
        f"the host's own work is {host_share:.0%} of a step, so rates are rather this machine's than the devices': "
        "raise emulated.time_scale, or use a larger model"
    )


def _encoders(config: RunConfig) -> Iterable[str]:
    return config.encoders if config.has_encoder_actors and config.mode != "colocated" else ()
