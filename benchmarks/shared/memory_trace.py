"""Peak memory of a call above what was allocated before it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def peak_above_now(run: Callable[[], object], device: torch.device) -> int:
    """Peak bytes of tensors during ``run``, above their bytes before it."""
    if device.type != "cpu":
        backend = torch.get_device_module(device)
        backend.synchronize(device)
        before = backend.memory_allocated(device)
        backend.reset_peak_memory_stats(device)
        run()
        backend.synchronize(device)
        return int(backend.max_memory_allocated(device) - before)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    # The CPU's allocator has no counters; its single events are only in the raw results.
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def held_by(module_tensors: list[torch.Tensor]) -> int:
    """Bytes of tensors on this rank, each storage once."""
    storages = {}
    for tensor in module_tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
