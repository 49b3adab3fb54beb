"""Measures the bytes that a forward leaves on the device for its backward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

LOG_LEVEL, ONLY_FAULTS = "KINETO_LOG_LEVEL", "6"
"""The variable of a process that counts on a CPU: below this level the profiler prints a line for each start."""


def kept_nbytes(run: Callable[[], object], device: torch.device) -> int:
    """Return the device bytes of tensors that live after ``run`` and did not before.

    On a CPU, whose allocator has no counters, they are summed over the profiler's events.
    """
    if device.type != "cpu":
        backend = torch.get_device_module(device)
        before = backend.memory_allocated(device)
        held = run()
        after = int(backend.memory_allocated(device))
        del held
        return after - int(before)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        held = run()
    del held
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    return int(sum(event.nbytes() for event in events if event.name() == "[memory]"))
