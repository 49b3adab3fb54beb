"""Peak memory of a call above what was allocated before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NO_BACKWARD = -1
"""Number of autograd's graph task outside of a backward."""


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


class LivePeak(TorchDispatchMode):
    """Counts the bytes of storages that operators allocate inside and that are alive, after every new one.

    It sees what other threads free, which the profiler does not, and storages that FSDP resizes. It does not see what
    an operator needs for itself. Autograd sums two gradients in place of the first, but not while such a mode is on:
    so a sum counts once the operator after it begins, when its parts are gone.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, StorageWeakRef] = {}
        self.counts = True
        """If False, storages are noted but not counted, which takes time."""
        self.peak_nbytes = 0
        self._has_sum = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._has_sum and self.counts:
            self._count()
        self._has_sum = func is torch.ops.aten.add.Tensor and torch._C._current_graph_task_id() != _NO_BACKWARD
        given = {storage._cdata for storage in _storages((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        new = {storage._cdata: StorageWeakRef(storage) for storage in _storages(out) if storage._cdata not in given}
        self._storages |= new
        if new and self.counts and not self._has_sum:
            self._count()
        return out

    def _count(self) -> None:
        nbytes = 0
        for pointer, reference in list(self._storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._storages[pointer]
            else:
                nbytes += storage.nbytes()
        self.peak_nbytes = max(self.peak_nbytes, nbytes)


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    """Of all tensors in nested values; of a DTensor this rank's part."""
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor):
            yield (value.to_local() if isinstance(value, DTensor) else value).untyped_storage()
