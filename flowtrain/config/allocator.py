"""How ``flowtrain plan`` divides the devices."""

from __future__ import annotations

from typing import Literal

from flowtrain.config.base import ConfigModel

AllocationMethod = Literal["milp", "even", "flops"]


class AllocatorConfig(ConfigModel):
    """``flowtrain plan``; a run does not read it."""

    method: AllocationMethod = "milp"
    """``milp`` matches production to consumption (docs/allocator.md). The others are for ablations: the backbone and
    all encoders together get a number of devices first, and then their best degrees for it. ``even``: half each.
    ``flops``: in proportion to their FLOPs for a sample."""
