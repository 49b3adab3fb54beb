"""Who goes first where processor cores are the devices."""

from __future__ import annotations

import os

import torch


def give_way(device: torch.device) -> None:
    """On a CPU, let an encoder's thread, and all that it starts, run only on cores that no other process wants.

    Whatever else runs then takes time from encoders, which are ahead of the ranks, and not from ranks. If ranks do
    wait for features, their cores are free. Threads that exist, such as Ray's, keep their priority.
    """
    if device.type == "cpu":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
