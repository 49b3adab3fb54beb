"""Packing methods by the name that ``scheduler.packing`` gives."""

from __future__ import annotations

from flowtrain.errors import ConfigError
from flowtrain.scheduler.packing.balanced import balanced
from flowtrain.scheduler.packing.base import Packer
from flowtrain.scheduler.packing.best_fit import best_fit
from flowtrain.scheduler.packing.best_fit_balanced import best_fit_balanced
from flowtrain.scheduler.packing.best_fit_decreasing import best_fit_decreasing
from flowtrain.scheduler.packing.groups import groups
from flowtrain.scheduler.packing.isf import isf
from flowtrain.scheduler.packing.random_order import random_order
from flowtrain.scheduler.packing.sequential import sequential

PACKERS: dict[str, Packer] = {
    "best_fit_balanced": best_fit_balanced,
    "best_fit": best_fit,
    "best_fit_decreasing": best_fit_decreasing,
    "balanced": balanced,
    "isf": isf,
    "groups": groups,
    "sequential": sequential,
    "random": random_order,
}


def get_packer(name: str) -> Packer:
    """Return the packing method called ``name``; ConfigError names the known ones."""
    if name not in PACKERS:
        raise ConfigError(f"scheduler.packing ({name!r}) is unknown; choose one of {', '.join(PACKERS)}")
    return PACKERS[name]
