"""Emulated devices: what stands in for accelerators that are not there (``model.device: emulated``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from flowtrain.config.base import ConfigModel
from flowtrain.errors import ConfigError, Fault, FaultCode

if TYPE_CHECKING:
    from flowtrain.config.run import RunConfig


class EmulatedConfig(ConfigModel):
    """The devices, and how this machine emulates them; only with ``model.device: emulated``."""

    device: str = "h200"
    """A device of the table (``flowtrain plan --device``). Modules with an ``accelerator_type`` have that one."""
    devices: int | None = Field(None, ge=1, le=1 << 20)
    """How many there are, for ``mode: auto``; None: as many as the configured degrees take."""
    devices_per_node: int = Field(8, ge=1, le=1 << 16)
    time_scale: float = Field(1.0, gt=0, le=1e6)
    """Factor of all waits. Above 1 a small machine keeps up with many devices; metrics are in the devices' time."""
    ranks_per_process: int = Field(16, ge=1, le=1 << 16)
    """Emulated devices of a process, whose actors are threads. A replica of the backbone is never divided."""
    profile: str | None = None
    """Times of a file that ``flowtrain profile`` wrote; None: by data sheets."""
    interference: float | None = Field(None, gt=0)
    """Time of an encoder and a rank that compute at once on one device, over the sum of both alone (``mode:
    colocated``); None: as the profile measured it, else the assumed one of plans."""
    feature_share: float = Field(1.0, gt=0, le=1)
    """Share of each feature row's bytes that really go through the pool, for machines with less memory than the
    devices' hosts; times do not depend on it."""


def emulation_is_asked_for(config: RunConfig) -> Iterator[Fault]:
    """Refuse settings of emulated devices without them, and with them what they do not have."""
    if config.model.device != "emulated":
        if config.emulated is not None:
            yield Fault(
                "emulated",
                FaultCode.CONFLICT,
                f"emulated has no effect with model.device ({config.model.device!r}); set that to 'emulated', or leave "
                "the section out",
            )
        return
    if config.pool.network != "none":
        yield Fault(
            "pool.network",
            FaultCode.CONFLICT,
            f"pool.network ({config.pool.network!r}) joins nodes, and emulated devices are all on this one; set it to "
            "'none'",
        )


def check_resumes(config: RunConfig, resume: bool) -> None:
    """Raise ConfigError if a run on emulated devices shall go on from a checkpoint."""
    if resume and config.emulation is not None:
        raise ConfigError.of(
            "model.device",
            FaultCode.RESUME,
            "--resume goes on from a checkpoint, and with model.device 'emulated' there is none (no weights exist); "
            f"start another run (name={config.name}-2) without it",
        )
