"""Host memory for tensors that wait there: pinned where an accelerator copies from it, and used again and again."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from flowtrain.mempool.arena import Arena, Run

SLAB_NBYTES = 64 << 20
"""Memory is taken in pieces of this size. A power of two: torch rounds pinned memory up to one."""

_ALIGNMENT = 512


class HostMemory:
    """Grows with what is in it and never shrinks, because pinning is slow.

    pinned: page-lock it, so that an accelerator copies without the host.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._slabs: list[Tensor] = []
        self._arena = Arena(0, _ALIGNMENT, "backbone.activation_checkpointing")
        self._nbytes = 0
        # Filled by destructors, which may run in the middle of any call.
        self._freed: deque[tuple[Run, ...]] = deque()
        self.peak_nbytes = 0
        """Most bytes that were in use at once."""

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        self._take_back()
        return self._nbytes

    @property
    def bound_nbytes(self) -> int:
        """Bytes taken from the system."""
        return self._arena.bound_nbytes

    def allocate(self, nbytes: int) -> tuple[Run, ...]:
        """Take ``nbytes``; give them back by `free`."""
        self._take_back()
        missing = self._arena.aligned(nbytes) - self._arena.free_nbytes
        for _ in range(-(-missing // SLAB_NBYTES)):
            self._slabs.append(torch.empty(SLAB_NBYTES, dtype=torch.uint8, pin_memory=self._pinned))
        self._arena.grow(SLAB_NBYTES * len(self._slabs))
        self._nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self._nbytes)
        return self._arena.allocate(nbytes)

    def free(self, runs: tuple[Run, ...]) -> None:
        """Give memory back. May be called from a destructor, in any thread."""
        self._freed.append(runs)

    def pieces(self, runs: Sequence[Run]) -> list[Tensor]:
        """The memory of an allocation in order, as uint8 tensors; none reaches over the end of a slab."""
        pieces = []
        for offset, nbytes in runs:
            while nbytes:
                index, start = divmod(offset, SLAB_NBYTES)
                piece = self._slabs[index][start : start + nbytes]
                pieces.append(piece)
                offset, nbytes = offset + len(piece), nbytes - len(piece)
        return pieces

    def _take_back(self) -> None:
        while self._freed:
            runs = self._freed.popleft()
            self._arena.free(runs)
            self._nbytes -= sum(nbytes for _, nbytes in runs)
