"""Buffers for network reads: registered once, returned as views, and reused when the views are gone."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

import numpy as np

from flowtrain.mempool.tiers import virtual_memory

_SMALLEST_NBYTES = 1 << 20


class LandingBuffer:
    """Registered memory of the process: ``nbytes`` bytes at ``address``."""

    def __init__(self, nbytes: int) -> None:
        # One page more, so that the bytes can start at a page, like those of a segment.
        self._memory = np.empty(nbytes + virtual_memory.PAGE_NBYTES, np.uint8)
        self.address = -(-self._memory.ctypes.data // virtual_memory.PAGE_NBYTES) * virtual_memory.PAGE_NBYTES
        self.nbytes = nbytes

    def bytes_at(self, start: int, nbytes: int) -> bytes:
        """Return a copy of some bytes."""
        offset = self.address - self._memory.ctypes.data + start
        return self._memory[offset : offset + nbytes].tobytes()


class LandingBuffers:
    """All landing buffers of one transport; the caller serialises ``take``.

    Sizes are powers of two, so that reads of similar sizes share a buffer, and one buffer of each size together take
    less than twice the largest.

    register: registers a new buffer with the network; called once per buffer, since it is slow.
    """

    def __init__(self, register: Callable[[LandingBuffer], None]) -> None:
        self._register = register
        # Views end in any thread at any moment, and appending to a deque needs no lock.
        self._idle: defaultdict[int, deque[LandingBuffer]] = defaultdict(deque)

    def take(self, nbytes: int) -> LandingBuffer:
        """Return a buffer of at least ``nbytes`` that is not in use."""
        size = max(_SMALLEST_NBYTES, 1 << (nbytes - 1).bit_length())
        idle = self._idle[size]
        if idle:
            return idle.popleft()
        buffer = LandingBuffer(size)
        self._register(buffer)
        return buffer

    def give_back(self, buffer: LandingBuffer) -> None:
        """Let a buffer be reused. No view may read it, and no transfer may write it."""
        self._idle[buffer.nbytes].append(buffer)

    def hand_over(self, buffer: LandingBuffer, let_go: Callable[[], None]) -> np.ndarray:
        """Return the buffer's bytes, uint8, read-only. ``let_go`` is called when they and every view of them are gone.

        ``let_go`` must give the buffer back, once no transfer writes it.
        """
        return virtual_memory.array_at(buffer.address, buffer.nbytes, writable=False, on_release=lambda *_: let_go())
