"""Copies parts from the pool to a device while it computes: through page-locked memory, on a separate stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from flowtrain.mempool.pool import Pool
from flowtrain.types.memory import Extent, Tier


class DeviceStaging:
    """Brings parts onto an accelerator while another thread computes there. Use it from one thread.

    Parts in HBM are copied between the node's devices. Parts in DRAM are read into one page-locked buffer, which is
    reused once the copy from it is done.

    pool: None for a process that only copies what it has beside its computation.
    """

    def __init__(self, pool: Pool | None, device: torch.device) -> None:
        self._pool = pool
        self._device = device
        self._stream = torch.Stream(device)
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._copied: torch.Event | None = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Run the work started inside on the side stream. May be nested, unlike ``with`` on the stream itself."""
        before = torch.accelerator.current_stream(self._device)
        torch.accelerator.set_stream(self._stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def get_batch(self, parts: Sequence[Sequence[Extent]]) -> list[torch.Tensor]:
        """Return the bytes of each part, uint8 on the device, valid once the side stream has reached this point.

        All parts may be released when this returns: reads of HBM are complete, and DRAM was read into the buffer.
        Raises as ``Pool.get_batch``.
        """
        extents = [extent for part in parts for extent in part]
        memory = self.empty(sum(extent.nbytes for extent in extents))
        self.read_into(extents, memory)
        return list(memory.split([sum(extent.nbytes for extent in part) for part in parts]))

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return memory on the device, uint8, for ``read_into``."""
        with self.aside():
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def read_into(self, extents: Sequence[Extent], memory: torch.Tensor) -> None:
        """Read extents one after another into memory of ``empty``, as long as they are; otherwise as ``get_batch``."""
        pool = self._pool
        assert pool is not None, "this process reads nothing from the pool"
        with self.aside():
            by_tier: dict[Tier, tuple[list[Extent], list[torch.Tensor]]] = {tier: ([], []) for tier in Tier}
            for extent, place in zip(extents, memory.split([extent.nbytes for extent in extents]), strict=True):
                those, places = by_tier[pool.tier_of(extent)]
                those.append(extent)
                places.append(place)
            pool.copy_to_device(*by_tier[Tier.HBM])
            self._stage(pool, *by_tier[Tier.DRAM])

    def put(self, data: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device, valid as of ``get_batch``."""
        with self.aside():
            return data.pin_memory().to(self._device, non_blocking=True)

    def mark(self) -> torch.Event:
        """Return an event after all work started aside so far, for ``hand_over``."""
        return self._stream.record_event()

    def hand_over(self, tensors: Iterable[torch.Tensor], ready: torch.Event) -> None:
        """Let the calling thread's stream use these tensors. It waits for ``ready``; the thread does not block."""
        stream = torch.accelerator.current_stream(self._device)
        stream.wait_event(ready)
        for tensor in tensors:
            tensor.record_stream(stream)  # otherwise their memory could be reused for the next batch while in use

    def _stage(self, pool: Pool, extents: Sequence[Extent], places: Sequence[torch.Tensor]) -> None:
        nbytes = sum(extent.nbytes for extent in extents)
        if not nbytes:
            return
        if self._copied is not None:
            self._copied.synchronize()
        if nbytes > len(self._buffer):
            self._buffer = torch.empty(1 << (nbytes - 1).bit_length(), dtype=torch.uint8, pin_memory=True)
        staged = self._buffer[:nbytes]
        pool.read_into(extents, staged.numpy())
        for place, data in zip(places, staged.split([extent.nbytes for extent in extents]), strict=True):
            place.copy_(data, non_blocking=True)
        self._copied = self._stream.record_event()
