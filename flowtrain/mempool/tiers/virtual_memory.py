"""Mappings at chosen addresses, which Python's mmap module does not offer: thin wrappers round libc."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Protocol

import numpy as np

PAGE_NBYTES = mmap.PAGESIZE
HUGE_PAGE_NBYTES = 2 << 20
_MAP_FIXED = 0x10  # values of Linux that the mmap module does not name
_MAP_NORESERVE = 0x4000
_PROT_NONE = 0
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MADV_COLLAPSE = 25  # Linux 6.1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value


def whole_pages(nbytes: int) -> int:
    """Bytes of the pages that ``nbytes`` need."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


class Pages(Protocol):
    """Page-locks mappings, as ``tiers.page_lock.PageLock`` does."""

    def lock(self, address: int, nbytes: int) -> bool:
        """Lock the pages of a mapping; returns whether they are locked."""

    def unlock(self, address: int) -> None:
        """Unlock the pages, before they are unmapped; they need not be locked."""


def reserve(nbytes: int) -> int:
    """Reserve a contiguous range of addresses, which takes no memory. Returns its start. Raises OSError if forbidden.

    The start is aligned for huge pages, so that a file mapped there can use them.
    """
    return _reserve(nbytes)


def withdraw(address: int, nbytes: int) -> None:
    """Turn part of a reservation back into reserved addresses, and unmap what was mapped there."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
    _map(address, nbytes, _PROT_NONE, flags, -1)


def map_file(fd: int, nbytes: int, *, writable: bool, address: int | None = None) -> int:
    """Map a file's first bytes, shared: at ``address`` inside a reservation, or at any free place if it is None.

    Returns the address; an address that was not given is aligned for huge pages. Raises OSError.
    """
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    start = _reserve(nbytes) if address is None else address
    try:
        return _map(start, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except OSError:
        if address is None:
            unmap(start, nbytes)
        raise


def map_private(nbytes: int) -> int:
    """Map new memory that this process alone sees; returns its address, aligned for huge pages. Raises OSError.

    Pages become huge ones where the host allows that on request.
    """
    start = _reserve(nbytes)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    try:
        address = _map(start, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1)
    except OSError:
        unmap(start, nbytes)
        raise
    _libc.madvise(address, nbytes, mmap.MADV_HUGEPAGE)  # a refusal costs only speed
    return address


def unmap(address: int, nbytes: int) -> None:
    """Give a range back to the system."""
    if _libc.munmap(address, nbytes):
        raise _last_error(f"munmap of {nbytes} bytes at {address:#x}")


def populate(address: int, nbytes: int) -> bool:
    """Touch a writable range without changing it. Returns False if the kernel cannot (before Linux 5.14)."""
    return _libc.madvise(address, nbytes, _MADV_POPULATE_WRITE) == 0


def join_pages(address: int, nbytes: int) -> bool:
    """Join the populated pages of a range into huge pages. Returns False if the kernel cannot (before Linux 6.1).

    The contents stay, and may be written at the same time. Pages that are pinned, or without a free huge page, stay as
    they are. address, nbytes: multiples of ``HUGE_PAGE_NBYTES``.

    Reason: shared memory gets huge pages by itself only if the host's ``shmem_enabled`` allows it. Copies into small
    pages were 5 to 10 % slower.
    """
    return _libc.madvise(address, nbytes, _MADV_COLLAPSE) == 0 or ctypes.get_errno() != errno.EINVAL


def array_at(address: int, nbytes: int, *, writable: bool, on_release: Callable[[int, int], None]) -> np.ndarray:
    """Return mapped bytes as a uint8 array.

    ``on_release(address, nbytes)`` is called when the array and every view of it are gone. It is not called at exit,
    when the system unmaps.
    """
    memory = _Memory(address, nbytes, writable)
    weakref.finalize(memory, on_release, address, nbytes).atexit = False
    return np.asarray(memory)


class _Memory:
    """The base that numpy keeps for an array and all its views."""

    def __init__(self, address: int, nbytes: int, writable: bool) -> None:
        self.__array_interface__ = {
            "data": (address, not writable),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def _reserve(nbytes: int) -> int:
    nbytes = whole_pages(nbytes)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    start = _map(None, nbytes + HUGE_PAGE_NBYTES, _PROT_NONE, flags, -1)
    address = -(-start // HUGE_PAGE_NBYTES) * HUGE_PAGE_NBYTES
    for first, end in ((start, address), (address + nbytes, start + nbytes + HUGE_PAGE_NBYTES)):
        if first < end:
            unmap(first, end - first)
    return address


def _map(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    result = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if result is None or result == _MAP_FAILED:
        raise _last_error(f"mmap of {nbytes} bytes")
    return int(result)


def _last_error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")
