"""Free-space bookkeeping of one segment. It works on offsets only and never touches memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NewType

from flowtrain.errors import AddressError, OutOfPoolMemory
from flowtrain.mempool.free_runs import FreeRuns

Hold = NewType("Hold", int)
"""Id of a promise of bytes that ``Arena.hold`` gave."""

Run = tuple[int, int]
"""(offset, nbytes) in the segment."""


class Arena:
    """Allocates aligned runs of a segment; only the number of free bytes decides whether a request succeeds.

    A request takes one contiguous run if one is long enough. Otherwise it is spread over the largest runs. So a promise
    (``hold``) is only a count of bytes, which no fragmentation can break.

    Runs have any length instead of a fixed block size: this gives the fewest pieces possible, 2 to 3 times fewer than
    blocks of 64 KiB in simulation, and promises need no rounding up to blocks.

    Not thread-safe: the pool locks.

    bound_nbytes: bytes to manage; bytes after the last multiple of ``alignment`` stay unused.
    alignment: of every run, in bytes.
    knob: configuration key that sets the segment's size, named when memory runs out.
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
        """Managed bytes: always ``free_nbytes + used_nbytes``."""
        return self._bound_nbytes

    @property
    def free_nbytes(self) -> int:
        """Bytes that belong to no allocation, promised ones included."""
        return self._free_nbytes

    @property
    def used_nbytes(self) -> int:
        """Bytes that belong to an allocation, alignment included."""
        return self._bound_nbytes - self._free_nbytes

    @property
    def available_nbytes(self) -> int:
        """Free bytes that are not promised."""
        return self._free_nbytes - self._held_nbytes

    @property
    def largest_free_nbytes(self) -> int:
        """Length of the largest free run."""
        largest = self._free.largest()
        return largest[1] if largest else 0

    @property
    def fragmentation(self) -> float:
        """Share of the free bytes that lie outside the largest free run; 0 if one run has all of them.

        Never above ``1 - 1 / (num_runs + 1)``, since a used run lies between any two free ones. Fragmentation wastes no
        memory: a request that fits into no single run is cut into the fewest pieces possible.
        """
        return 1 - self.largest_free_nbytes / self._free_nbytes if self._free_nbytes else 0.0

    @property
    def num_runs(self) -> int:
        """Number of runs in use."""
        return len(self._used)

    def free_runs(self) -> list[Run]:
        """Return all free runs in order of offset."""
        return self._free.runs()

    def aligned(self, nbytes: int) -> int:
        """Return the bytes that a request of ``nbytes`` takes."""
        return -(-nbytes // self._alignment) * self._alignment

    def is_used(self, offset: int, nbytes: int) -> bool:
        """Whether a run in use starts at ``offset`` and holds these bytes."""
        return nbytes <= self._used.get(offset, 0)

    def grow(self, bound_nbytes: int) -> None:
        """Also manage the new bytes up to ``bound_nbytes``. Raises AddressError if that is less than before."""
        bound_nbytes -= bound_nbytes % self._alignment
        added = bound_nbytes - self._bound_nbytes
        if added < 0:
            raise AddressError(f"a segment cannot shrink from {self._bound_nbytes} to {bound_nbytes} bytes")
        if added:
            self._free.add(self._bound_nbytes, added)
            self._bound_nbytes = bound_nbytes
            self._free_nbytes += added

    def hold(self, nbytes: int) -> Hold:
        """Promise bytes to later requests. Requests under the returned id succeed until their sum exceeds ``nbytes``.

        nbytes: sum of the later requests, each rounded up by ``aligned``. Raises OutOfPoolMemory.
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
        """Give back the rest of a promise. Raises AddressError if it is not open."""
        self._held_nbytes -= self._open(hold)
        del self._holds[hold]

    def allocate(self, nbytes: int, hold: Hold | None = None) -> tuple[Run, ...]:
        """Take ``nbytes``, from a promise if one is given. Returns runs in order; their lengths sum to ``nbytes``.

        Every run starts aligned. Takes all or nothing: raises OutOfPoolMemory, or AddressError for a closed promise.
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
        """Free runs, all or none; returns the bytes freed. Raises AddressError for a run that is not in use."""
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
        """Undo requests: free their runs, and give the bytes back to their promise if it is open."""
        freed = self.free(runs)
        if hold in self._holds:
            self._holds[hold] += freed
            self._held_nbytes += freed

    def _spread(self, need: int) -> list[Run]:
        """Take ``need`` bytes from several runs; they are free, but in no single run."""
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
