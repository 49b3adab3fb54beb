"""What can be planned but not run yet, so that no configuration is refused for it before it is to start."""

from __future__ import annotations

from flowtrain.config.messages import refusal
from flowtrain.config.run import RunConfig
from flowtrain.errors import Fault, FaultCode


def startable_faults(config: RunConfig) -> list[Fault]:
    """Return why no run starts like that; empty where one does."""
    if len(config.encoders) == 1:
        return []
    text = (
        f"encoders has {len(config.encoders)} entries ({', '.join(config.encoders)}); family {config.model.family!r} "
        "has exactly one encoder"
    )
    return [Fault("encoders", FaultCode.ENCODERS, text)]


def check_startable(config: RunConfig) -> None:
    """Raise ConfigError, with all faults, where no run starts like that."""
    if faults := startable_faults(config):
        raise refusal(f"run {config.name!r}", faults)
