"""Which rank reads which microbatch, and when its bytes are wanted no more.

The ranks of a data parallel replica, its members, work on the same microbatches: each reads them from the pool by
itself, in an order that is the same for all, with the same samples rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from flowtrain.errors import DataError, PoolError
from flowtrain.mempool.directory import Directory
from flowtrain.types.messages import MicrobatchLocation, RankReport
from flowtrain.types.plan import StepPlan


@dataclass
class _Reading:
    """A microbatch on its way to the members. rejected: what they leave out; told: who knows where it lies."""

    rejected: tuple[int, ...]
    told: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)


@dataclass
class _UnitReaders:
    """A unit that ranks read. unread: microbatches that some member has not read. orders: slots by replica, in the
    order in which its members take them (``arrival`` order). taken: how many of these each rank has been told."""

    unread: int
    orders: dict[int, list[int]] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)
    readings: dict[tuple[int, int], _Reading] = field(default_factory=dict)


class Readers:
    """Hands microbatches to ranks, numbered replica by replica, and frees them when all members have read them.

    replica_size: members of a replica. With more than one, no microbatch of a unit is handed out before the unit before
    is read by everybody: what one member has read stays in the pool for the others, and must not stand in the way of
    what they still wait for.
    """

    def __init__(self, directory: Directory, replica_size: int) -> None:
        self._directory = directory
        self._replica_size = replica_size
        self._units: dict[int, _UnitReaders] = {}

    def locate(self, plan: StepPlan, slot: int | None, rank: int) -> MicrobatchLocation | None:
        """Return where a microbatch lies for a rank, or None while it has to wait; may be asked again.

        slot None (``arrival`` order): what the rank's replica takes next. The first member that comes to its n-th
        microbatch takes the first that is READY; the others follow. Raises DataError where a sample that a member may
        have read was rejected since.
        """
        unit = plan.unit.index
        if self._unit_before(unit) is not None:
            return None
        dp_rank = rank // self._replica_size
        readers = self._units.setdefault(unit, _UnitReaders(plan.num_microbatches))
        if slot is not None:
            return self._tell(readers, unit, slot, rank)
        order, number = readers.orders.setdefault(dp_rank, []), readers.taken.get(rank, 0)
        if number == len(order):
            free = (ready for ready in self._directory.ready_slots(unit, dp_rank) if ready not in order)
            if (chosen := next(free, None)) is None:
                return None
            order.append(chosen)
        location = self._tell(readers, unit, order[number], rank)
        if location is not None:
            readers.taken[rank] = number + 1
        return location

    def release(self, unit: int, slot: int, rank: int) -> bool:
        """A rank has read a microbatch; True if with it everybody has read the whole unit.

        Raises PoolError for one that the rank was never told, or has read before.
        """
        dp_rank = rank // self._replica_size
        readers = self._units.get(unit)
        reading = readers.readings.get((slot, dp_rank)) if readers is not None else None
        if readers is None or reading is None or rank not in reading.told or rank in reading.done:
            raise PoolError(
                f"unit {unit}, slot {slot} cannot be released by rank {rank}: it is not reading it, or has read it"
            )
        reading.done.add(rank)
        if len(reading.done) < self._replica_size:
            return False
        self._directory.release(unit, slot, dp_rank)
        readers.unread -= 1
        return not readers.unread

    def end_unit(self, unit: int) -> None:
        """Forget a unit that all ranks are done with."""
        self._units.pop(unit, None)

    def describe_wait(self, plan: StepPlan, slot: int | None, rank: int) -> str:
        """Say what a rank waits for."""
        unit, dp_rank = plan.unit.index, rank // self._replica_size
        before = self._unit_before(unit)
        if before is not None:
            return f"unit {unit} comes when all ranks have read unit {before}, which lacks {self._units[before].unread}"
        if slot is None:
            readers = self._units.get(unit, _UnitReaders(0))
            order, number = readers.orders.get(dp_rank, []), readers.taken.get(rank, 0)
            open_slots = (k for k in range(plan.num_slots) if k not in order)
            slot = order[number] if number < len(order) else next(open_slots, 0)
        return self._directory.describe_wait(unit, slot, dp_rank)

    def _unit_before(self, unit: int) -> int | None:
        """An earlier unit that somebody has not read yet, if that matters."""
        if self._replica_size == 1:
            return None
        return next((other for other, readers in self._units.items() if other < unit and readers.unread), None)

    def _tell(self, readers: _UnitReaders, unit: int, slot: int, rank: int) -> MicrobatchLocation | None:
        dp_rank = rank // self._replica_size
        location = self._directory.locate(unit, slot, dp_rank)
        if location is None:
            return None
        reading = readers.readings.setdefault((slot, dp_rank), _Reading(location.rejected))
        if location.rejected != reading.rejected:
            # Its parts were lost and made again, and this time something is wrong with a sample.
            if reading.told - {rank}:
                late = sorted(set(location.rejected) - set(reading.rejected))
                raise DataError(
                    f"positions {late} were found bad when they were made again, after other ranks of the replica had "
                    "been told to train on them: their source has changed. Start again with --resume"
                )
            reading.rejected = location.rejected
        reading.told.add(rank)
        return location


def of_replicas(reports: Sequence[RankReport]) -> tuple[RankReport, ...]:
    """Merge the reports of all ranks to one for each replica, in order.

    Each duration is that of the member that took longest, which the others wait for, microbatch by microbatch; the
    replica starts with its first and finishes with its last.
    """
    replicas: dict[int, list[RankReport]] = {}
    for report in reports:
        replicas.setdefault(report.dp_rank, []).append(report)
    return tuple(_merged(replicas[dp_rank]) for dp_rank in sorted(replicas))


def _merged(members: Sequence[RankReport]) -> RankReport:
    return replace(
        members[0],
        started_s=min(member.started_s for member in members),
        finished_s=max(member.finished_s for member in members),
        starved_s=max(member.starved_s for member in members),
        fetch_s=max(member.fetch_s for member in members),
        microbatch_s=tuple(map(max, zip(*(member.microbatch_s for member in members), strict=True))),
    )
