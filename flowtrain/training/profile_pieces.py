"""Runs one piece of work again and again, alone or while another process does the same on the device."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress

import torch

from flowtrain.training.profile_device import clock_of


class Pieces:
    """A process's share of a device: pieces of work and their times.

    On a CPU times are processor seconds of this thread, elsewhere seconds until the device is done.
    """

    def __init__(self, run: Callable[[], object], device: torch.device) -> None:
        self._run, self._now_s = run, clock_of(device)

    def warm_up(self) -> float:
        """Run two pieces; returns the seconds of the second by the wall."""
        self._run()
        started_s = time.monotonic()
        self._run()
        self._now_s()  # an accelerator may still compute
        return time.monotonic() - started_s

    def repeat(self, begin_s: float, end_s: float) -> float:
        """Work from ``begin_s`` until after ``end_s``, on the node's monotonic clock; returns the mean of a piece.

        The last piece ends later and does not count, unless it is the only one.
        """
        time.sleep(max(0.0, begin_s - time.monotonic()))
        started_s, pieces, mean_s = self._now_s(), 0, 0.0
        while True:
            self._run()
            over, pieces = time.monotonic() > end_s, pieces + 1
            if not over or pieces == 1:
                mean_s = (self._now_s() - started_s) / pieces
            if over:
                return mean_s


def pin_to(num_cores: int) -> None:
    """Keep this process on the first of the cores that it may use."""
    cores = sorted(os.sched_getaffinity(0))[:num_cores]
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), cores)
