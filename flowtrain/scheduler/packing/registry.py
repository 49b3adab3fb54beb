"""Packing methods by the name that ``scheduler.packing`` gives."""

from __future__ import annotations

from flowtrain.errors import ConfigError
from flowtrain.scheduler.packing.base import Packer
from flowtrain.scheduler.packing.best_fit import best_fit

PACKERS: dict[str, Packer] = {"best_fit": best_fit}


def get_packer(name: str) -> Packer:
    """Return the packing method called ``name``; ConfigError names the known ones."""
    if name not in PACKERS:
        raise ConfigError(f"scheduler.packing ({name!r}) is unknown; choose one of {', '.join(sorted(PACKERS))}")
    return PACKERS[name]
