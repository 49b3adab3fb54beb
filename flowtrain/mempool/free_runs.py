"""An index of free runs of bytes: coalescing, near-best fit and largest run, each in O(log n) amortised.

Runs are sorted into size classes, 16 for each power of two (two-level segregated fit). A class is a heap with its
largest run on top. Entries of runs that no longer exist stay in the heap until they reach the top or outnumber the
others. The run that was touched last is kept apart: freed bytes are often needed next, and then no heap is searched.
"""

from __future__ import annotations

import heapq

_SLACK = 16


def _size_class(nbytes: int) -> int:
    """Return the class of a size; it never falls as sizes grow. Sizes of one class differ by less than 1/16."""
    if nbytes < 16:
        return nbytes
    shift = nbytes.bit_length() - 5
    return ((shift + 1) << 4) + ((nbytes >> shift) & 15)


class FreeRuns:
    """Disjoint free runs ``(start, nbytes)``. Neighbours are always joined into one run."""

    __slots__ = ("_heaps", "_hot_nbytes", "_hot_start", "_living", "_nbytes_from", "_occupied", "_start_to")

    def __init__(self) -> None:
        self._hot_start = 0
        self._hot_nbytes = 0  # 0: there is none
        self._nbytes_from: dict[int, int] = {}
        self._start_to: dict[int, int] = {}
        self._heaps: dict[int, list[tuple[int, int]]] = {}
        self._living: dict[int, int] = {}
        self._occupied = 0

    def __len__(self) -> int:
        return len(self._nbytes_from) + (self._hot_nbytes > 0)

    def runs(self) -> list[tuple[int, int]]:
        """Return all runs in order of address."""
        hot = [(self._hot_start, self._hot_nbytes)] if self._hot_nbytes else []
        return sorted([*self._nbytes_from.items(), *hot])

    def add(self, start: int, nbytes: int) -> None:
        """Add a free run, and join it with its free neighbours."""
        end = start + nbytes
        before = self._start_to.get(start)
        if before is not None:
            self._remove(before, start - before)
            start = before
        after = self._nbytes_from.get(end)
        if after is not None:
            self._remove(end, after)
            end += after
        if self._hot_nbytes:
            hot_end = self._hot_start + self._hot_nbytes
            if hot_end == start:
                start = self._hot_start
            elif self._hot_start == end:
                end = hot_end
            else:
                self._insert(self._hot_start, self._hot_nbytes)
        self._hot_start = start
        self._hot_nbytes = end - start

    def take(self, nbytes: int) -> int | None:
        """Cut ``nbytes`` from the start of a long enough run, of the closest class; None if no run is long enough."""
        hot_nbytes = self._hot_nbytes
        if hot_nbytes != nbytes:
            start = self._take_closer(nbytes, hot_nbytes)
            if start is not None or hot_nbytes < nbytes:
                return start
        start = self._hot_start
        self._hot_start = start + nbytes
        self._hot_nbytes = hot_nbytes - nbytes
        return start

    def take_largest(self) -> tuple[int, int]:
        """Take the whole largest run; returns (start, nbytes). There must be one."""
        found = self.largest()
        assert found is not None
        if found[0] == self._hot_start and self._hot_nbytes:
            self._hot_nbytes = 0
        else:
            self._remove(*found)
        return found

    def largest(self) -> tuple[int, int] | None:
        """Return the largest run (start, nbytes), or None if nothing is free."""
        found = self._top(self._occupied.bit_length() - 1) if self._occupied else None
        if self._hot_nbytes > (found[1] if found else 0):
            return self._hot_start, self._hot_nbytes
        return found

    def _take_closer(self, nbytes: int, hot_nbytes: int) -> int | None:
        """As ``take``, from a closer class than that of the run kept apart; from any class if that run is too short."""
        size_class = _size_class(nbytes)
        fitting = self._occupied >> size_class
        if hot_nbytes >= nbytes:
            fitting &= (1 << (_size_class(hot_nbytes) - size_class)) - 1
        while fitting:
            start, run_nbytes = self._top(size_class + (fitting & -fitting).bit_length() - 1)
            if run_nbytes >= nbytes:
                self._cut(start, run_nbytes, nbytes)
                return start
            fitting &= fitting - 1  # only runs of the first class can be too short
        return None

    def _cut(self, start: int, run_nbytes: int, nbytes: int) -> None:
        """Take the first ``nbytes`` of a run that is the largest of its class."""
        rest = run_nbytes - nbytes
        size_class = _size_class(run_nbytes)
        if not rest or _size_class(rest) != size_class:
            self._remove(start, run_nbytes)
            if rest:
                self._insert(start + nbytes, rest)
            return
        # A short cut from a long run, the usual case: the rest takes its place.
        del self._nbytes_from[start]
        self._nbytes_from[start + nbytes] = rest
        self._start_to[start + run_nbytes] = start + nbytes
        heapq.heapreplace(self._heaps[size_class], (-rest, start + nbytes))

    def _top(self, size_class: int) -> tuple[int, int]:
        heap = self._heaps[size_class]
        while True:
            negative, start = heap[0]
            if self._nbytes_from.get(start) == -negative:
                return start, -negative
            heapq.heappop(heap)

    def _insert(self, start: int, nbytes: int) -> None:
        self._nbytes_from[start] = nbytes
        self._start_to[start + nbytes] = start
        size_class = _size_class(nbytes)
        living = self._living.get(size_class, 0) + 1
        self._living[size_class] = living
        self._occupied |= 1 << size_class
        heap = self._heaps.setdefault(size_class, [])
        heapq.heappush(heap, (-nbytes, start))
        if len(heap) > 2 * living + _SLACK:
            self._sweep(size_class)

    def _remove(self, start: int, nbytes: int) -> None:
        del self._nbytes_from[start]
        del self._start_to[start + nbytes]
        size_class = _size_class(nbytes)
        self._living[size_class] -= 1
        if not self._living[size_class]:
            self._heaps[size_class].clear()
            self._occupied &= ~(1 << size_class)

    def _sweep(self, size_class: int) -> None:
        entries = {entry for entry in self._heaps[size_class] if self._nbytes_from.get(entry[1]) == -entry[0]}
        heap = sorted(entries)
        self._heaps[size_class] = heap
