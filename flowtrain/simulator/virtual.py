"""A run's flow in virtual time: its events, who must ask it again, and the memory of its pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush

from flowtrain.flow.flow import Flow
from flowtrain.types.memory import Extent

Clock = Callable[[], float]
Act = Callable[[], None]


class VirtualFlow:
    """The flow of a simulated run with its clock, its events, and what wakes those who wait.

    Of events at one time, the one that was planned first happens first.

    make_flow: builds the flow with a clock, which returns seconds.
    alignment: of extents in the pool, in bytes.
    """

    def __init__(self, make_flow: Callable[[Clock], Flow], alignment: int) -> None:
        self.now_s = 0.0
        self.flow = make_flow(lambda: self.now_s)
        self.flow.log.idle = None  # it follows the wall clock, and no unit of this run would take it
        self.alignment = alignment
        self.may_feed = False
        """Feeders that wait for work must ask again: the window moved, or parts were lost."""
        self.has_room = False
        """Feeders that wait for room must ask again."""
        self.may_lease = False
        """Encoders that wait must ask again: there are new batches, or memory is free."""
        self.may_plan = False
        """Replicas that wait for a plan must ask again."""
        self.ready_ranks: set[int] = set()
        """Replicas with a microbatch that became ready."""
        self.all_may_read = False
        """Any replica that waits for a microbatch must ask again."""
        self._events: list[tuple[float, int, Act]] = []
        self._num_events = 0

    def at(self, when_s: float, act: Act) -> None:
        """Have something happen at a time that is not past."""
        assert when_s >= self.now_s, (when_s, self.now_s)
        self._num_events += 1
        heappush(self._events, (when_s, self._num_events, act))

    def advance(self) -> bool:
        """Let the next event happen; False if there is none."""
        if not self._events:
            return False
        self.now_s, _, act = heappop(self._events)
        act()
        return True

    def note_released(self) -> None:
        """Note that memory of the pool may be freed."""
        self.has_room = self.may_lease = True

    def note_membership(self) -> None:
        """Note that a process joined or is gone."""
        self.may_feed = self.has_room = self.may_lease = self.all_may_read = True

    def aligned(self, extents: Iterable[Extent]) -> int:
        """Return the bytes that extents take in a segment."""
        alignment = self.alignment
        return sum([-(-extent.nbytes // alignment) * alignment for extent in extents])


class Occupancy:
    """Bytes in use over time, of several segments together."""

    def __init__(self, clock: VirtualFlow) -> None:
        self._clock = clock
        self._used_nbytes = 0
        self._since_s = 0.0
        self._byte_seconds = 0.0
        self.peak_nbytes = 0

    def add(self, nbytes: int) -> None:
        """Use more bytes from now on, or fewer."""
        now_s = self._clock.now_s
        self._byte_seconds += self._used_nbytes * (now_s - self._since_s)
        self._since_s = now_s
        self._used_nbytes += nbytes
        if self._used_nbytes > self.peak_nbytes:
            self.peak_nbytes = self._used_nbytes

    @property
    def mean_nbytes(self) -> float:
        """Mean over the time since the start."""
        self.add(0)
        return self._byte_seconds / self._since_s if self._since_s else 0.0


class Segment:
    """What one process gives to the pool.

    It keeps no addresses: in a segment, only the number of free bytes decides whether a request succeeds
    (``mempool.arena``). Every extent has the segment's first address.

    base: first address. nbytes: size; None: no limit.
    """

    def __init__(self, base: int, nbytes: int | None, occupancy: Occupancy) -> None:
        self._base = base
        self._nbytes = nbytes if nbytes is not None else 1 << 62
        self._occupancy = occupancy
        self._used_nbytes = 0
        self._extents: dict[int, tuple[Extent, ...]] = {}

    @property
    def free_nbytes(self) -> int:
        """Bytes that are not in use."""
        return self._nbytes - self._used_nbytes

    def take(self, nbytes: int) -> None:
        """Use bytes, with what alignment adds."""
        self._used_nbytes += nbytes
        self._occupancy.add(nbytes)

    def free(self, nbytes: int) -> None:
        """Use fewer bytes."""
        self._used_nbytes -= nbytes
        self._occupancy.add(-nbytes)
        assert self._used_nbytes >= 0, "bytes were freed twice"

    def drop(self) -> None:
        """Free all: the process is gone."""
        self.free(self._used_nbytes)

    def extents(self, nbytes: int) -> tuple[Extent, ...]:
        """Return where a part of so many bytes lies."""
        found = self._extents.get(nbytes)
        if found is None:
            found = self._extents[nbytes] = (Extent(self._base, nbytes),)
        return found
