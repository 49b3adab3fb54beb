"""Which device an actor computes on."""

from __future__ import annotations

import torch


def default_device(choice: str) -> torch.device:
    """The accelerator that this process was given, else the CPU; ``cpu`` (``model.device``) forces the latter."""
    if choice == "cpu" or not torch.accelerator.is_available():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return accelerator
