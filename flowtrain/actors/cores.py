"""Who goes first where processor cores are the devices."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flowtrain.config.run import RunConfig

logger = logging.getLogger(__name__)

STEPS = 4
"""Of niceness; each is worth a quarter of a core's time against another process that wants it."""
_NICEST = 19


@contextmanager
def giving_way(config: RunConfig, device: torch.device) -> Iterator[None]:
    """On a CPU, let this thread, and all that it starts meanwhile, come after others that want the same core.

    Encoders are ahead of the ranks, so what the coordinator and Ray take is better taken from them than from a rank,
    for which all others wait. Threads that exist, such as Ray's, keep their priority. Emulated devices are no cores.
    """
    if device.type != "cpu" or config.emulation is not None:
        yield
        return
    thread = threading.get_native_id()
    before = os.getpriority(os.PRIO_PROCESS, thread)
    _set(thread, min(before + STEPS, _NICEST))
    try:
        yield
    finally:
        _set(thread, before)


def _set(thread: int, niceness: int) -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
    except OSError as error:  # a sandbox may forbid it, and only the superuser may go back
        logger.debug("the niceness of thread %d cannot become %d: %s", thread, niceness, error)
