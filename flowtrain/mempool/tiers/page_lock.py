"""Page-locked DRAM: what the device's copy engine reads and writes without a detour, and beside other work."""

from __future__ import annotations

import logging
import threading

import torch

logger = logging.getLogger(__name__)

_ALL_DEVICES = 1


class PageLock:
    """Page-locks mapped memory with the device runtime, for all devices of this process. Thread-safe.

    What the runtime refuses stays pageable, and a warning says why: copies are slower, nothing else changes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.RLock()  # a mapping may die, and be unlocked, at any moment
        self._locked: set[int] = set()

    def lock(self, address: int, nbytes: int) -> None:
        """Lock a mapping's pages, which touches them all.

        To be called in a thread that starts no kernels: the runtime remembers a refusal for the thread's next one.
        """
        with self._lock:
            error = torch.cuda.cudart().cudaHostRegister(address, nbytes, _ALL_DEVICES)
            if int(error) == 0:
                self._locked.add(address)
                return
        logger.warning(
            "%d bytes of pool memory cannot be page-locked, so that copies between them and %s are slower: "
            "cudaHostRegister says %s",
            nbytes,
            self._device,
            torch.cuda.CudaError(int(error)),
        )

    def unlock(self, address: int) -> None:
        """Let the pages of a mapping go, before it is unmapped; not locked is fine."""
        with self._lock:
            if address in self._locked:
                self._locked.discard(address)
                torch.cuda.cudart().cudaHostUnregister(address)
