"""The microbatches of planned units: which may run, which ranks have read them, and when their bytes are free.

The ranks of a data parallel replica work on the same microbatches. Each rank reads them from the pool by itself. All of
them use the same order and leave out the same rejected samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flowtrain.errors import DataError, PoolError
from flowtrain.flow.parts import Parts
from flowtrain.flow.records import MicrobatchRecord
from flowtrain.types.messages import MicrobatchLocation, PartLocation
from flowtrain.types.plan import StepPlan, Unit
from flowtrain.types.samples import TEXT_PART


@dataclass(slots=True)
class _UnitRecord:
    """A planned unit until it is consumed."""

    unit: Unit
    ready_slots: list[set[int]]
    """For each replica: slots that may run."""
    microbatches: dict[tuple[int, int], MicrobatchRecord] = field(default_factory=dict)
    """By (slot, dp_rank)."""
    num_unread: int = 0
    """Microbatches that at least one rank of their replica has not read."""
    orders: dict[int, list[int]] = field(default_factory=dict)
    """In ``arrival`` order, by replica: slots in the order in which its ranks take them."""
    num_taken: dict[int, int] = field(default_factory=dict)
    """In ``arrival`` order, by rank: how many of these slots it has taken."""


class Microbatches:
    """Tells ranks where microbatches lie, and frees a microbatch when all ranks of its replica have read it.

    Ranks are numbered replica by replica. With several ranks in a replica, no rank gets a microbatch of a unit before
    all ranks have read the unit before. Otherwise parts that one rank has read and others have not would take the
    memory of parts for which the others still wait.

    replica_size: ranks of a replica.
    """

    def __init__(self, parts: Parts, replica_size: int = 1) -> None:
        self._parts = parts
        self._replica_size = replica_size
        self._units: dict[int, _UnitRecord] = {}

    def add(self, plan: StepPlan) -> None:
        """Take in a unit's plan: its microbatches, and encode batches of the parts that are in none yet.

        Raises PoolError unless every position of the unit is planned once or rejected, and every encoder's part is in
        the plan's batches or in earlier ones.
        """
        index, dp_size = plan.unit.index, plan.dp_size
        if index in self._units:
            raise PoolError(f"unit {index} was planned twice")
        record = _UnitRecord(plan.unit, [set() for _ in range(dp_size)])
        num_planned = start = 0
        for number, end in enumerate(plan.ends):
            slot, dp_rank = divmod(number, dp_size)
            microbatch = MicrobatchRecord(index, slot, dp_rank, record.ready_slots[dp_rank])
            num_planned += self._fill(microbatch, plan.positions[start:end])
            record.microbatches[slot, dp_rank] = microbatch
            start = end
        for number in plan.unit.positions:
            position = self._parts[number]
            if position.microbatch is None and not position.rejected:
                raise PoolError(f"unit {index} leaves out its position {number}, which was not rejected")
        num_batched = sum(len(batch.positions) for batch in plan.encode_batches)
        if num_batched != num_planned:
            raise PoolError(
                f"unit {index}: its samples need {num_planned} parts from encoders, its encode batches have "
                f"{num_batched}"
            )
        self._parts.add_batches(plan.encode_batches)
        record.num_unread = len(record.microbatches)
        self._units[index] = record

    def _fill(self, microbatch: MicrobatchRecord, numbers: tuple[int, ...]) -> int:
        """Put positions into a microbatch; returns how many of their parts are in no encode batch."""
        num_unbatched = 0
        for number in numbers:
            position = self._parts[number]
            if position.microbatch is not None:
                raise PoolError(f"position {number} was planned twice; every position runs once")
            position.microbatch = microbatch
            microbatch.positions.append(position)
            microbatch.missing += position.missing > 0 and not position.rejected
            for part in position.parts:
                num_unbatched += part.batch is None and part.name != TEXT_PART
        if not microbatch.missing:
            microbatch.ready_slots.add(microbatch.slot)
        return num_unbatched

    # --- ranks --------------------------------------------------------------------------------------------------

    def locate(self, unit: int, slot: int | None, rank: int, limit: int = 1) -> tuple[MicrobatchLocation, ...]:
        """Return where a microbatch and those after it lie for a rank, up to the first that is not ready.

        Empty while the first one is not ready. May be called again for the same microbatch.

        slot: the first microbatch. None (``arrival`` order): the one that the rank's replica takes next. The first rank
        that asks for the replica's n-th microbatch gets any that is ready; the other ranks get the same one.
        limit: most microbatches to return.

        Raises DataError if a sample was rejected after another rank may have read it.
        """
        record = self._units.get(unit)
        if record is None or self._unit_before(unit) is not None:
            return ()
        dp_rank = rank // self._replica_size
        found: list[MicrobatchLocation] = []
        while len(found) < limit:
            wanted = slot + len(found) if slot is not None else self._next_slot(record, dp_rank, rank)
            if wanted is None or wanted not in record.ready_slots[dp_rank]:
                break
            found.append(self._located(record.microbatches[wanted, dp_rank], rank))
            if slot is None:
                record.num_taken[rank] = record.num_taken.get(rank, 0) + 1
        return tuple(found)

    def release(self, unit: int, slots: tuple[int, ...], rank: int) -> bool:
        """Note that a rank has read microbatches. Returns whether all ranks have now read the whole unit.

        Once all ranks of the replica have read a microbatch, its bytes may be freed, and lost parts are not produced
        again. Raises PoolError for a microbatch whose place the rank does not know, or that it has read before.
        """
        dp_rank = rank // self._replica_size
        record = self._units.get(unit)
        for slot in slots:
            microbatch = record.microbatches.get((slot, dp_rank)) if record is not None else None
            if record is None or microbatch is None or rank not in microbatch.located_by or rank in microbatch.read_by:
                raise PoolError(f"unit {unit}, slot {slot} cannot be released by rank {rank}: {_why(microbatch, rank)}")
            microbatch.read_by.add(rank)
            if len(microbatch.read_by) < self._replica_size:
                continue
            microbatch.is_released = True
            microbatch.ready_slots.discard(slot)
            for position in microbatch.positions:
                self._parts.drop(position)
            record.num_unread -= 1
        return record is not None and not record.num_unread

    def end(self, unit: int) -> Unit:
        """Forget a unit, and return it. Raises PoolError if it is not planned, or not fully released."""
        record = self._units.get(unit)
        if record is None or record.num_unread:
            what = (
                "it is not planned" if record is None else f"{record.num_unread} of its microbatches are not released"
            )
            raise PoolError(f"unit {unit} cannot be consumed: {what}")
        return self._units.pop(unit).unit

    def describe_wait(self, unit: int, slot: int | None, rank: int) -> str:
        """Return what a rank waits for; arguments as of ``locate``."""
        before, dp_rank = self._unit_before(unit), rank // self._replica_size
        if before is not None:
            num_unread = self._units[before].num_unread
            return f"unit {unit} waits until all ranks have read unit {before}: {num_unread} microbatches are left"
        record = self._units.get(unit)
        if record is not None and slot is None:
            order, number = record.orders.get(dp_rank, []), record.num_taken.get(rank, 0)
            untaken = (slot for slot, _ in record.microbatches if slot not in order)
            slot = order[number] if number < len(order) else min(untaken, default=0)
        slot = slot if slot is not None else 0
        microbatch = record.microbatches.get((slot, dp_rank)) if record is not None else None
        who = f"unit {unit}, slot {slot}, rank {dp_rank}"
        if microbatch is None:
            return f"{who} is not planned"
        if microbatch.is_released or not microbatch.missing:
            return f"{who} is {'released' if microbatch.is_released else 'ready'}"
        return f"{who} waits for {self._parts.leases.describe_waits(microbatch.positions)}"

    # --- inside -------------------------------------------------------------------------------------------------

    def _unit_before(self, unit: int) -> int | None:
        """Return an earlier unit that a rank has not read yet; None without one, or if replicas have one rank."""
        if self._replica_size == 1:
            return None
        return next((index for index, record in self._units.items() if index < unit and record.num_unread), None)

    def _next_slot(self, record: _UnitRecord, dp_rank: int, rank: int) -> int | None:
        """Return the slot that a rank takes next in ``arrival`` order, or None while none is ready."""
        order, number = record.orders.setdefault(dp_rank, []), record.num_taken.get(rank, 0)
        if number == len(order):
            ready = record.ready_slots[dp_rank].difference(order)
            if not ready:
                return None
            order.append(min(ready))
        return order[number]

    def _located(self, microbatch: MicrobatchRecord, rank: int) -> MicrobatchLocation:
        parts = tuple(
            [
                PartLocation(position.ref.position, part.name, part.extents)
                for position in microbatch.positions
                if not position.rejected
                for part in position.parts
            ]
        )
        rejected = tuple([position.ref.position for position in microbatch.positions if position.rejected])
        if rejected != microbatch.left_out:
            # Its parts were lost and produced again, and this time a sample turned out bad.
            if microbatch.located_by - {rank}:
                late = sorted(set(rejected) - set(microbatch.left_out))
                raise DataError(
                    f"positions {late} were found bad when they were produced again, but other ranks of the replica "
                    "may have trained on them: their source has changed. Start again with --resume"
                )
            microbatch.left_out = rejected
        microbatch.located_by.add(rank)
        return MicrobatchLocation(microbatch.unit, microbatch.slot, microbatch.dp_rank, parts, rejected)


def _why(microbatch: MicrobatchRecord | None, rank: int) -> str:
    if microbatch is None:
        return "it is not planned"
    return "the rank has read it before" if rank in microbatch.read_by else "the rank does not know where it lies"
