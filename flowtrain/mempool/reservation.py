"""Reserved room in a process's segment, which the caller writes in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

import numpy as np

from flowtrain.errors import PoolError
from flowtrain.mempool.arena import Hold, Run
from flowtrain.types.memory import Extent

_NEW = Extent.__new__
_SET_GVA: Callable[[Extent, int], None] = Extent.gva.__set__  # type: ignore[attr-defined]
_SET_NBYTES: Callable[[Extent, int], None] = Extent.nbytes.__set__  # type: ignore[attr-defined]


class Giver(Protocol):
    """The owner of the room: a ``Pool``."""

    def give_back(self, extents: Sequence[Extent], hold: Hold | None) -> None:
        """Free room that was not committed, and give it back to the promise that it came from."""


class Reservation:
    """Room in the pool to write in place: fill ``views``, then ``commit``. Leaving the block without ``commit`` aborts.

    giver: the pool.
    extents: where the bytes will lie.
    views: the same runs as writable uint8 arrays, in order.
    hold: promise that the room came from, or None.
    """

    __slots__ = ("_giver", "_hold", "extents", "views")

    def __init__(
        self, giver: Giver, extents: tuple[Extent, ...], views: tuple[np.ndarray, ...], hold: Hold | None
    ) -> None:
        self.extents = extents
        self.views = views
        self._giver: Giver | None = giver  # None after a commit or an abort
        self._hold = hold

    def commit(self) -> tuple[Extent, ...]:
        """Keep the bytes. Returns their extents."""
        if self._giver is None:
            raise self._settled()
        self._giver = None
        return self.extents

    def abort(self) -> None:
        """Free the room again, and give it back to its promise if it came from one."""
        giver, self._giver = self._giver, None
        if giver is None:
            raise self._settled()
        giver.give_back(self.extents, self._hold)

    def _settled(self) -> PoolError:
        return PoolError("this reservation was committed or aborted before")

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._giver is not None:
            self.abort()


def room_of(giver: Giver, base: int, array: np.ndarray, runs: Sequence[Run], hold: Hold | None) -> Reservation:
    """Return the reservation of ``runs`` of a segment: ``array`` has its bytes, ``base`` is its address.

    After large payloads have emptied the caches every object and call costs time, so a single run uses the fewest.
    """
    if len(runs) == 1:
        ((offset, nbytes),) = runs
        extent = _NEW(Extent)  # without the frozen class's __setattr__: a third of the time
        _SET_GVA(extent, base + offset)
        _SET_NBYTES(extent, nbytes)
        return Reservation(giver, (extent,), (array[offset : offset + nbytes],), hold)
    extents = tuple(Extent(base + offset, nbytes) for offset, nbytes in runs)
    return Reservation(giver, extents, tuple(array[offset : offset + nbytes] for offset, nbytes in runs), hold)
