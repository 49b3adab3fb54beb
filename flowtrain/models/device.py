"""Which device an actor computes on."""

from __future__ import annotations

import torch


def default_device(choice: str) -> torch.device:
    """The accelerator of this process, else the CPU; another choice (``model.device``) than ``auto``: the CPU."""
    if choice != "auto" or not torch.accelerator.is_available():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return accelerator


def device_name(device: torch.device) -> str:
    """The kind of device, as torch names it (``NVIDIA H200``); ``cpu`` for all CPUs."""
    return "cpu" if device.type == "cpu" else str(torch.get_device_module(device).get_device_name(device))
