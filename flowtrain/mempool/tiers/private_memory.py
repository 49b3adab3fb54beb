"""Host memory of one process for copies from its device: in huge pages, touched ahead of use, page-locked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np

from flowtrain.errors import ResourceError
from flowtrain.mempool.tiers import virtual_memory
from flowtrain.mempool.tiers.virtual_memory import Pages, whole_pages

_TOUCH_NBYTES = 64 << 20
_LEAST_LOCKED_NBYTES = 1 << 20
"""A smaller copy takes no longer without a lock than a lock takes."""


def touched_memory(sizes: Sequence[int], pages: Pages | None) -> list[np.ndarray]:
    """Return new memory of each size in bytes, uint8; the mapping is given back when the last array is gone.

    Each array has pages of its own. First all are touched, which takes long and disturbs nobody; only then they are
    locked. A device's runtime that gets memory and locks it in one call keeps every thread from its device meanwhile.
    pages: locks the pages; None: they are not locked. Raises ResourceError if the machine refuses the memory.
    """
    total = sum(map(whole_pages, sizes))
    if not total:
        return [np.empty(0, np.uint8) for _ in sizes]
    try:
        address = virtual_memory.map_private(total)
    except OSError as error:
        raise ResourceError(f"cannot get {total} bytes of memory for copies of a rank's state: {error}") from error
    locked: list[int] = []
    memory = virtual_memory.array_at(address, total, writable=True, on_release=partial(_give_back, pages, locked))
    for offset in range(0, total, _TOUCH_NBYTES):
        part = memory[offset : offset + _TOUCH_NBYTES]
        if not virtual_memory.populate(address + offset, part.nbytes):
            part.fill(0)
    arrays, offset = [], 0
    for nbytes in sizes:
        arrays.append(memory[offset : offset + nbytes])
        offset += whole_pages(nbytes)
    if pages is not None:
        locked += _locked(arrays, pages)
    return arrays


def _locked(arrays: Iterable[np.ndarray], pages: Pages) -> list[int]:
    """Lock arrays, each by itself, since a copy must not cross from one locked range into another."""
    addresses = []
    for array in arrays:
        if array.nbytes < _LEAST_LOCKED_NBYTES:
            continue
        if not pages.lock(array.ctypes.data, array.nbytes):
            break  # the reason stands for the others too
        addresses.append(array.ctypes.data)
    return addresses


def _give_back(pages: Pages | None, locked: list[int], address: int, nbytes: int) -> None:
    if pages is not None:
        for each in locked:
            pages.unlock(each)
    virtual_memory.unmap(address, nbytes)
