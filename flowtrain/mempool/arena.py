"""Free-space bookkeeping of one segment. Knows offsets only; never touches memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NewType

from flowtrain.errors import AddressError, OutOfPoolMemory
from flowtrain.mempool.free_runs import FreeRuns

Hold = NewType("Hold", int)
"""Names a promise of bytes, made by ``Arena.hold``."""

Run = tuple[int, int]
"""(offset, nbytes) in the segment."""


class Arena:
    """Allocates aligned runs of a segment; only the number of free bytes decides whether a request succeeds.

    A request takes one contiguous run where there is one. Else it is spread over the largest runs. So a promise
    (``hold``) is a mere count of bytes, which no fragmentation can break. (Whole runs rather than
    blocks of a fixed size: they give the fewest pieces there can be, 2 to 3 times fewer than blocks of 64 KiB in
    simulation, and no promise has to be rounded up to blocks.)

    bound_nbytes: bytes to manage; what lies past the last multiple of ``alignment`` stays unused. knob: the
    configuration key that sizes the segment, named when memory runs out. Not thread-safe: the pool locks.
    """

    __slots__ = (
        "_alignment",
        "_bound_nbytes",
        "_free",
        "_free_nbytes",
        "_held_nbytes",
        "_holds",
        "_knob",
        "_next_hold",
        "_used",
    )

    def __init__(self, bound_nbytes: int, alignment: int, knob: str) -> None:
        assert alignment > 0, alignment
        self._alignment = alignment
        self._knob = knob
        self._free = FreeRuns()
        self._used: dict[int, int] = {}
        self._holds: dict[Hold, int] = {}
        self._next_hold = 1
        self._held_nbytes = 0
        self._bound_nbytes = 0
        self._free_nbytes = 0
        self.grow(bound_nbytes)

    @property
    def bound_nbytes(self) -> int:
        """Bytes under management: always ``free_nbytes + used_nbytes``."""
        return self._bound_nbytes

    @property
    def free_nbytes(self) -> int:
        """Bytes that belong to no allocation, promised ones included."""
        return self._free_nbytes

    @property
    def used_nbytes(self) -> int:
        """Bytes that belong to an allocation, with what alignment adds."""
        return self._bound_nbytes - self._free_nbytes

    @property
    def available_nbytes(self) -> int:
        """Free bytes that are promised to nobody."""
        return self._free_nbytes - self._held_nbytes

    @property
    def largest_free_nbytes(self) -> int:
        """Length of the largest free run."""
        largest = self._free.largest()
        return largest[1] if largest else 0

    @property
    def fragmentation(self) -> float:
        """Share of the free bytes that lie outside the largest free run: 0 if one run has all of them.

        Never above ``1 - 1 / (num_runs + 1)``, since two free runs always have a used one between them. It costs no
        memory: a request that no run can hold is cut into as few pieces as there can be.
        """
        return 1 - self.largest_free_nbytes / self._free_nbytes if self._free_nbytes else 0.0

    @property
    def num_runs(self) -> int:
        """Runs that are in use."""
        return len(self._used)

    def free_runs(self) -> list[Run]:
        """Return all free runs in order of offset."""
        return self._free.runs()

    def aligned(self, nbytes: int) -> int:
        """Return what a request of ``nbytes`` really takes."""
        return -(-nbytes // self._alignment) * self._alignment

    def is_used(self, offset: int, nbytes: int) -> bool:
        """Whether these bytes lie in one run that starts at ``offset`` and is in use."""
        return nbytes <= self._used.get(offset, 0)

    def grow(self, bound_nbytes: int) -> None:
        """Take in the bytes up to ``bound_nbytes``, newly bound. Raises AddressError if that is less than before."""
        bound_nbytes -= bound_nbytes % self._alignment
        added = bound_nbytes - self._bound_nbytes
        if added < 0:
            raise AddressError(f"a segment cannot shrink from {self._bound_nbytes} to {bound_nbytes} bytes")
        if added:
            self._free.add(self._bound_nbytes, added)
            self._bound_nbytes = bound_nbytes
            self._free_nbytes += added

    def hold(self, nbytes: int) -> Hold:
        """Promise bytes to later requests: those made under the returned id succeed while their sum stays within.

        nbytes: the sum of the later requests, each rounded up by ``aligned``. Raises OutOfPoolMemory.
        """
        nbytes = self.aligned(nbytes)
        if nbytes > self.available_nbytes:
            raise self._out_of_memory(nbytes)
        hold = Hold(self._next_hold)
        self._next_hold += 1
        self._holds[hold] = nbytes
        self._held_nbytes += nbytes
        return hold

    def unhold(self, hold: Hold) -> None:
        """Give back what is left of a promise. Raises AddressError for one that is not open."""
        self._held_nbytes -= self._open(hold)
        del self._holds[hold]

    def allocate(self, nbytes: int, hold: Hold | None = None) -> tuple[Run, ...]:
        """Take ``nbytes``, from a promise if one is given; returns runs in order, whose lengths sum to ``nbytes``.

        Every run starts aligned. All or nothing: raises OutOfPoolMemory, or AddressError for a closed promise.
        """
        need = -(-nbytes // self._alignment) * self._alignment
        if hold is not None:
            left = self._open(hold)
            if need > left:
                raise self._out_of_memory(need, f"; the lease that it belongs to has {left} bytes left")
            self._holds[hold] = left - need
            self._held_nbytes -= need
        elif need > self._free_nbytes - self._held_nbytes:
            raise self._out_of_memory(need)
        if not need:
            return ()
        offset = self._free.take(need)
        if offset is not None:
            self._used[offset] = need
            self._free_nbytes -= need
            return ((offset, nbytes),)
        pieces = self._spread(need)
        self._used.update(pieces)
        self._free_nbytes -= need
        last_offset, last_nbytes = pieces[-1]
        pieces[-1] = (last_offset, last_nbytes - (need - nbytes))
        return tuple(pieces)

    def free(self, runs: Sequence[Run]) -> int:
        """Give runs back; returns the bytes freed. All or none: raises AddressError for a run that is not in use."""
        seen: set[int] = set()
        for offset, nbytes in runs:
            used = self._used.get(offset)
            if used is None or used != self.aligned(nbytes) or offset in seen:
                raise AddressError(
                    f"cannot free {nbytes} bytes at offset {offset}: "
                    + ("they are not in use (freed twice?)" if used is None or offset in seen else f"{used} are in use")
                )
            seen.add(offset)
        freed = 0
        for offset, _ in runs:
            nbytes = self._used.pop(offset)
            self._free.add(offset, nbytes)
            freed += nbytes
        self._free_nbytes += freed
        return freed

    def give_back(self, runs: Sequence[Run], hold: Hold | None) -> None:
        """Undo requests: free their runs, and let an open promise have its bytes again."""
        freed = self.free(runs)
        if hold in self._holds:
            self._holds[hold] += freed
            self._held_nbytes += freed

    def _spread(self, need: int) -> list[Run]:
        """Take ``need`` bytes, which are free, though in no single run."""
        pieces: list[Run] = []
        while need:
            offset = self._free.take(need)
            if offset is not None:
                pieces.append((offset, need))
                break
            largest = self._free.take_largest()
            pieces.append(largest)
            need -= largest[1]
        return pieces

    def _open(self, hold: Hold) -> int:
        left = self._holds.get(hold)
        if left is None:
            raise AddressError(f"hold {hold} is not open (given back twice?)")
        return left

    def _out_of_memory(self, nbytes: int, why: str = "") -> OutOfPoolMemory:
        return OutOfPoolMemory(
            f"{nbytes} bytes asked, {self._free_nbytes} of {self._bound_nbytes} free ({self._held_nbytes} of them "
            f"promised to leases), largest free block {self.largest_free_nbytes}{why}; raise {self._knob}"
        )
