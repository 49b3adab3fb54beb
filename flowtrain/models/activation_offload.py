"""Activation offload: what decoder layers keep for the backward pass waits in host memory.

Stored is every tensor that a layer's operators save, by its whole storage, except

- parameters and views of them, because FSDP2 frees and fills their memory itself;
- storages of less than ``SMALL_NBYTES``.

A storage is stored once in a call of the model, however many operators and layers save it (as they do rotary
positions). The device keeps at most what two neighbouring layers saved: a layer's tensors leave it at the end of the
next layer's forward, and come back when the backward pass begins with the layer after it. Tensors of the layer called
last stay there until another layer is called, so a backward pass that follows at once does not wait for them. If only
some layers offload, their neighbours are the next ones that do.

An accelerator copies on streams of its own, from and to pinned memory. On a CPU all is copied too, which saves nothing:
it is there to be tested.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from flowtrain.models.host_memory import HostMemory
from flowtrain.models.parallel_layers import local_shard

SMALL_NBYTES = 1024
"""Storages below this stay on the device."""

_Geometry = tuple[torch.dtype, int, torch.Size, tuple[int, ...]]
"""Type, offset in the storage, size and strides (in elements) of a tensor."""


class ActivationStore:
    """The host memory of a device's activations, and the streams that copy; see the module.

    All models of a process share one (`store_for`).
    """

    def __init__(self, device: torch.device) -> None:
        is_accelerator = device.type != "cpu"
        self.device = device
        self.host = HostMemory(pinned=is_accelerator)
        self._leaving = torch.Stream(device) if is_accelerator else None
        self._returning = torch.Stream(device) if is_accelerator else None
        self._last_layer: LayerCopies | None = None

    def offload(self, layer: LayerCopies) -> None:
        """Start to copy what a layer saved, and let go of what the layer called before it saved."""
        with self._beside(self._leaving):
            if self._leaving is not None and self._returning is not None:
                # Memory that was given back may still be read.
                self._leaving.wait_event(self._returning.record_event())
            for copy in layer.copies():
                copy.send()
        layer.has_left = None if self._leaving is None else self._leaving.record_event()
        last, self._last_layer = self._last_layer, layer
        if last is not None:
            self.wait_for(last.has_left)
            for copy in last.copies():
                copy.leave_device()

    def fetch(self, copy: HostCopy) -> torch.Event | None:
        """Fill ``copy.on_device`` from the host; returns the event to wait for."""
        copy.on_device = torch.empty(copy.nbytes, dtype=torch.uint8, device=self.device)
        with self._beside(self._returning):
            copy.receive(copy.on_device)
        return None if self._returning is None else self._returning.record_event()

    def wait_for(self, event: torch.Event | None) -> None:
        """Let the calling thread's stream wait."""
        if event is not None:
            torch.accelerator.current_stream(self.device).wait_event(event)

    def _beside(self, stream: torch.Stream | None) -> AbstractContextManager[Any]:
        """Work on a side stream, after all that the calling thread's stream has been given so far."""
        if stream is None:
            return nullcontext()
        stream.wait_event(torch.accelerator.current_stream(self.device).record_event())
        return stream


@cache
def store_for(device: torch.device) -> ActivationStore:
    """The process's store of a device's activations."""
    return ActivationStore(device)


class HostCopy:
    """The copy of one storage in host memory; gives the memory back when no saved tensor needs it any more."""

    def __init__(self, store: ActivationStore, tensor: Tensor, source: StorageWeakRef) -> None:
        self._store, self._source = store, source
        self._saved: Tensor | None = tensor
        self._version = tensor._version
        self.on_device: Tensor | None = _all_bytes(tensor)
        self.nbytes = len(self.on_device)
        self._ready: torch.Event | None = None
        self._runs = store.host.allocate(self.nbytes)

    def send(self) -> None:
        """Copy to the host."""
        assert self.on_device is not None and self._saved is not None
        assert self._saved._version == self._version, "a saved tensor was changed in place within its layer"
        self._saved = None
        start = 0
        for piece in self._store.host.pieces(self._runs):
            piece.copy_(self.on_device[start : start + len(piece)], non_blocking=True)
            start += len(piece)

    def receive(self, target: Tensor) -> None:
        """Copy from the host."""
        start = 0
        for piece in self._store.host.pieces(self._runs):
            target[start : start + len(piece)].copy_(piece, non_blocking=True)
            start += len(piece)

    def leave_device(self) -> None:
        """Let go of the tensor on the device."""
        self.on_device = None

    def fetch(self) -> None:
        """Start to bring the bytes back, if they have left."""
        if self.on_device is None:
            self._ready = self._store.fetch(self)

    def view(self, geometry: _Geometry) -> Tensor:
        """A tensor over the bytes, which are on the device when the calling thread's stream reaches it."""
        self.fetch()
        assert self.on_device is not None
        self._store.wait_for(self._ready)
        self._ready = None
        dtype, offset, size, stride = geometry
        empty = torch.empty(0, dtype=dtype, device=self._store.device)
        return empty.set_(self.on_device.untyped_storage(), offset, size, stride)

    def __del__(self) -> None:
        self._store.wait_for(self._ready)  # else the device's memory could be used again while it is filled
        self._store.host.free(self._runs)


class LayerCopies:
    """What one layer saved first in one call. before: the layer called before it, whose backward follows its own."""

    def __init__(self, before: LayerCopies | None) -> None:
        self._before = before
        self._copies: list[weakref.ref[HostCopy]] = []
        self._is_needed = False
        self.has_left: torch.Event | None = None

    def add(self, copy: HostCopy) -> None:
        """Note a copy; the saved tensors hold it, not this list."""
        self._copies.append(weakref.ref(copy))

    def copies(self) -> Iterator[HostCopy]:
        """Copies that saved tensors still need, in the order in which they were saved."""
        return (copy for reference in self._copies if (copy := reference()) is not None)

    def begin_backward(self) -> None:
        """Fetch what this layer and the one before it saved, once."""
        if self._is_needed:
            return
        self._is_needed = True
        self._fetch()
        if self._before is not None:
            self._before._fetch()

    def _fetch(self) -> None:
        for copy in reversed(list(self.copies())):
            copy.fetch()


class _SavedView:
    """In place of a saved tensor: what it needs to come back as a view of its storage's copy."""

    __slots__ = ("_copy", "_geometry", "_layer")

    def __init__(self, layer: LayerCopies, copy: HostCopy, tensor: Tensor) -> None:
        self._layer, self._copy = layer, copy
        self._geometry: _Geometry = (tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def restore(self) -> Tensor:
        self._layer.begin_backward()
        return self._copy.view(self._geometry)


class OffloadedCall:
    """One call of a model, whose layers' saved tensors go to the host."""

    def __init__(self, store: ActivationStore) -> None:
        self._store = store
        self._last_layer: LayerCopies | None = None
        # A storage's address is not used again while its copy has a weak reference to it.
        self._known: weakref.WeakValueDictionary[tuple[int, int], HostCopy] = weakref.WeakValueDictionary()

    def run(self, layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer's forward; its parameters are those that it has now (FSDP2 exchanges them)."""
        copies = self._last_layer = LayerCopies(before=self._last_layer)
        parameters = {
            StorageWeakRef(local_shard(parameter.detach()).untyped_storage()).cdata for parameter in layer.parameters()
        }
        with saved_tensors_hooks(partial(self._pack, copies, parameters), _unpack):
            output = forward(*args, **kwargs)
        self._store.offload(copies)
        return output

    def _pack(self, layer: LayerCopies, parameters: set[int], tensor: Tensor) -> Tensor | _SavedView:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type != self._store.device.type:
            return tensor
        storage = tensor.untyped_storage()
        source = StorageWeakRef(storage)
        if storage.nbytes() < SMALL_NBYTES or source.cdata in parameters:
            return tensor
        key = source.cdata, tensor._version
        copy = self._known.get(key)
        if copy is None:
            copy = self._known[key] = HostCopy(self._store, tensor, source)
            layer.add(copy)
        return _SavedView(layer, copy, tensor)


def _unpack(saved: Tensor | _SavedView) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved.restore()


def _all_bytes(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor as uint8."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
