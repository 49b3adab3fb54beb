"""Keeps a process on one core."""

from __future__ import annotations

import os


def stay_on(number: int) -> None:
    """Keep this process, with all its present and later threads, on one of the first two cores that it may use."""
    core = sorted(os.sched_getaffinity(0))[number % 2]
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {core})
