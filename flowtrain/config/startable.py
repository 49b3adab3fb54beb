"""What can be planned but not run yet. Only a start refuses it, so that such configurations can be planned."""

from __future__ import annotations

from flowtrain.config.messages import refusal
from flowtrain.config.run import RunConfig
from flowtrain.errors import Fault, FaultCode


def startable_faults(config: RunConfig) -> list[Fault]:
    """Return why a run with this configuration cannot start; empty if it can."""
    if len(config.encoders) == 1:
        return []
    text = (
        f"encoders has {len(config.encoders)} entries ({', '.join(config.encoders)}); family {config.model.family!r} "
        "has exactly one encoder"
    )
    return [Fault("encoders", FaultCode.ENCODERS, text)]


def check_startable(config: RunConfig) -> None:
    """Raise ConfigError, with all faults, if a run with this configuration cannot start."""
    if faults := startable_faults(config):
        raise refusal(f"run {config.name!r}", faults)
