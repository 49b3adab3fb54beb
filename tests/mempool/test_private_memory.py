"""Memory for copies of a rank's state: pages of its own for each size, touched before any is locked, given back."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import pytest

from flowtrain.errors import ResourceError
from flowtrain.mempool.tiers import virtual_memory
from flowtrain.mempool.tiers.private_memory import touched_memory

MIB = 1 << 20
SIZES = (3 * MIB + 5, 0, 4, MIB, 100)


class FakePages:
    """Notes what is locked. most: locks before the runtime refuses."""

    def __init__(self, most: int = 99) -> None:
        self.locked: dict[int, int] = {}
        self.resident: list[int] = []
        self._most = most

    def lock(self, address: int, nbytes: int) -> bool:
        self.resident.append(resident_nbytes(address))
        if len(self.locked) == self._most:
            return False
        self.locked[address] = nbytes
        return True

    def unlock(self, address: int) -> None:
        del self.locked[address]


def resident_nbytes(address: int) -> int:
    """Of the mapping at an address."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            found = start <= address < end
        elif found and first == "Rss:":
            return int(line.split()[1]) << 10
    return 0


def test_each_size_has_pages_of_its_own_and_keeps_its_bytes() -> None:
    arrays = touched_memory(SIZES, None)
    assert [array.nbytes for array in arrays] == list(SIZES)
    assert all(array.ctypes.data % mmap.PAGESIZE == 0 for array in arrays if array.nbytes)
    for number, array in enumerate(arrays, 1):
        array[:] = number
    assert all((array == number).all() for number, array in enumerate(arrays, 1))


def test_large_ones_are_locked_once_all_are_touched_and_unlocked_with_the_last_array() -> None:
    pages = FakePages()
    arrays = touched_memory(SIZES, pages)
    assert pages.locked == {array.ctypes.data: array.nbytes for array in arrays if array.nbytes >= MIB}
    assert min(pages.resident) >= sum(SIZES), "all were touched before the first was locked"
    address, last = arrays[0].ctypes.data, arrays[2]
    del arrays
    gc.collect()
    assert pages.locked and resident_nbytes(address), "an array is left"
    del last
    gc.collect()
    assert not pages.locked and not resident_nbytes(address)


def test_after_a_refusal_the_rest_stays_pageable() -> None:
    pages = FakePages(most=1)
    arrays = touched_memory((MIB, MIB, MIB), pages)
    assert len(pages.locked) == 1 and len(pages.resident) == 2, "the first refusal stands for the rest"
    del arrays
    gc.collect()
    assert not pages.locked


def test_a_kernel_that_does_not_touch_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_memory, "populate", lambda address, nbytes: False)
    (array,) = touched_memory((8 * MIB,), None)
    assert resident_nbytes(array.ctypes.data) >= 8 * MIB and not array.any()


def test_memory_that_the_machine_does_not_have_is_an_error_with_its_size() -> None:
    with pytest.raises(ResourceError, match=rf"cannot get {1 << 60} bytes of memory for copies of a rank's state"):
        touched_memory((1 << 60,), None)


def test_no_sizes() -> None:
    assert [array.nbytes for array in touched_memory((0, 0), None)] == [0, 0] and touched_memory((), None) == []
