"""Page-locked DRAM: the device's copy engine reads and writes it directly, at the same time as other work."""

from __future__ import annotations

import logging
import threading

import torch

logger = logging.getLogger(__name__)

_ALL_DEVICES = 1


class PageLock:
    """Page-locks mapped memory with the device runtime, for all devices of this process. Thread-safe.

    Memory that the runtime refuses stays pageable, and a warning gives the reason. Only copies are slower then.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.RLock()  # a mapping may end, and be unlocked, at any moment
        self._locked: set[int] = set()

    def lock(self, address: int, nbytes: int) -> bool:
        """Lock a mapping's pages, which touches them all; returns whether they are locked.

        Call it in a thread that starts no kernels: the runtime reports a refusal again at the thread's next kernel.
        """
        with self._lock:
            error = torch.cuda.cudart().cudaHostRegister(address, nbytes, _ALL_DEVICES)
            if int(error) == 0:
                self._locked.add(address)
                return True
        logger.warning(
            "%d bytes of host memory cannot be page-locked, so copies between them and %s are slower: "
            "cudaHostRegister reports %s",
            nbytes,
            self._device,
            torch.cuda.CudaError(int(error)),
        )
        return False

    def unlock(self, address: int) -> None:
        """Unlock a mapping's pages, before it is unmapped; they need not be locked."""
        with self._lock:
            if address in self._locked:
                self._locked.discard(address)
                torch.cuda.cudart().cudaHostUnregister(address)
