"""The microbatches of planned units: which may run, which their replica has read, and when their bytes are free.

A replica is one reader here, whatever its number of ranks: its leader asks for all of them, and reports what all of
them have read. So all use the same order and leave out the same rejected samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flowtrain.errors import PoolError
from flowtrain.flow.parts import Parts
from flowtrain.flow.records import MicrobatchRecord, PartRecord, PositionRecord
from flowtrain.types.messages import MicrobatchLocation, PartLocation
from flowtrain.types.plan import StepPlan, Unit
from flowtrain.types.samples import FED_PARTS, IMAGES_PART, Rejection


@dataclass(slots=True)
class _UnitRecord:
    """A planned unit until it is consumed."""

    unit: Unit
    ready_slots: list[set[int]]
    """For each replica: slots that may run."""
    microbatches: dict[tuple[int, int], MicrobatchRecord] = field(default_factory=dict)
    """By (slot, dp_rank)."""
    num_unread: int = 0
    """Microbatches that their replica has not read."""

    @property
    def is_complete(self) -> bool:
        """Whether no microbatch that is not read misses a part."""
        return sum(map(len, self.ready_slots)) == self.num_unread


class Microbatches:
    """Tells replicas where microbatches lie, and frees a microbatch when its replica has read it.

    No replica waits for another one. A replica asks only for what it has room for, so it reads at once whatever it has
    asked for; therefore located bytes, which are never evicted, become free without any other event.

    whole_units: no microbatch of a unit is located while a part of the unit is missing (``mode: disaggregated``). The
        pool holds a whole unit, and no part of the first unread unit is evicted, so every unit becomes complete.
    """

    def __init__(self, parts: Parts, whole_units: bool = False) -> None:
        self._parts = parts
        self.whole_units = whole_units
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
                num_unbatched += part.batch is None and part.name not in FED_PARTS
        if not microbatch.missing:
            microbatch.ready_slots.add(microbatch.slot)
        return num_unbatched

    # --- replicas -----------------------------------------------------------------------------------------------

    def locate(self, unit: int, slot: int | None, dp_rank: int, limit: int = 1) -> tuple[MicrobatchLocation, ...]:
        """Return where a microbatch of a replica and those after it lie, up to the first that is not ready.

        Empty while the first one, or with ``whole_units`` any of the unit, is not ready. May be called again for the
        same microbatch by its slot.

        slot: the first microbatch. None (``arrival`` order): any ready one that the replica does not know yet.
        limit: most microbatches to return.
        """
        record = self._units.get(unit)
        if record is None or (self.whole_units and not record.is_complete):
            return ()
        found: list[MicrobatchLocation] = []
        while len(found) < limit:
            wanted = slot + len(found) if slot is not None else _next_slot(record, dp_rank)
            if wanted is None or wanted not in record.ready_slots[dp_rank]:
                break
            found.append(_located(record.microbatches[wanted, dp_rank]))
        return tuple(found)

    def release(self, unit: int, slots: tuple[int, ...], dp_rank: int) -> None:
        """Note that a replica has read microbatches: their bytes may be freed, and lost parts are not produced again.

        Raises PoolError for a microbatch whose place the replica does not know, or that it has read before.
        """
        record = self._units.get(unit)
        for slot in slots:
            microbatch = record.microbatches.get((slot, dp_rank)) if record is not None else None
            if record is None or microbatch is None or not microbatch.is_located or microbatch.is_released:
                raise PoolError(f"unit {unit}, slot {slot} cannot be released by replica {dp_rank}: {_why(microbatch)}")
            microbatch.is_released = True
            microbatch.ready_slots.discard(slot)
            for position in microbatch.positions:
                self._parts.drop(position)
            record.num_unread -= 1

    @property
    def kept_unit(self) -> int | None:
        """With ``whole_units``, the first unit that is not read: none of its parts may be evicted."""
        if not self.whole_units:
            return None
        return min((unit for unit, record in self._units.items() if record.num_unread), default=None)

    @property
    def num_ready_units(self) -> int:
        """Planned units of which no unread microbatch misses a part."""
        return sum(record.is_complete for record in self._units.values())

    def is_ready(self, unit: int, slot: int, dp_rank: int) -> bool:
        """Whether a replica may run a microbatch of a planned unit now."""
        record = self._units.get(unit)
        if record is None or (self.whole_units and not record.is_complete):
            return False
        return slot in record.ready_slots[dp_rank]

    def is_read(self, unit: int) -> bool:
        """Whether all microbatches of a planned unit are read."""
        record = self._units.get(unit)
        return record is not None and not record.num_unread

    def is_complete(self, unit: int) -> bool:
        """Whether a planned unit misses no part."""
        record = self._units.get(unit)
        return record is not None and record.is_complete

    def reject(self, dp_rank: int, rejection: Rejection) -> bool:
        """Quarantine a sample of a microbatch that a replica is reading; its ranks all leave it out.

        Returns False if it was rejected before. Raises PoolError unless the replica knows where its microbatch lies,
        and has not reported it as read: otherwise it could have trained on the sample.
        """
        position = self._parts[rejection.ref.position]
        microbatch = position.microbatch
        if microbatch is None or microbatch.dp_rank != dp_rank or not microbatch.is_located or microbatch.is_released:
            why = _why(microbatch)
            if microbatch is not None and microbatch.dp_rank != dp_rank:
                why = f"replica {microbatch.dp_rank} runs it"
            raise PoolError(f"position {rejection.ref.position} cannot be rejected by replica {dp_rank}: {why}")
        return self._parts.reject(rejection, by_reader=True)

    def end(self, unit: int) -> Unit:
        """Forget a unit, and return it. Raises PoolError if it is not planned, or not fully released."""
        record = self._units.get(unit)
        if record is None or record.num_unread:
            what = (
                "it is not planned" if record is None else f"{record.num_unread} of its microbatches are not released"
            )
            raise PoolError(f"unit {unit} cannot be consumed: {what}")
        return self._units.pop(unit).unit

    def describe_wait(self, unit: int, slot: int | None, dp_rank: int) -> str:
        """Return what a replica waits for; arguments as of ``locate``."""
        record = self._units.get(unit)
        if record is not None and slot is None:
            unknown = (s for (s, rank), m in record.microbatches.items() if rank == dp_rank and not m.is_located)
            slot = min(unknown, default=0)
        slot = slot if slot is not None else 0
        microbatch = record.microbatches.get((slot, dp_rank)) if record is not None else None
        who = f"unit {unit}, slot {slot}, replica {dp_rank}"
        if microbatch is None:
            return f"{who} is not planned"
        if self.whole_units and record is not None and not record.is_complete:
            positions = [position for each in record.microbatches.values() for position in each.positions]
            return f"{who} waits for the whole unit: {self._parts.leases.describe_waits(positions)}"
        if microbatch.is_released or not microbatch.missing:
            return f"{who} is {'released' if microbatch.is_released else 'ready'}"
        return f"{who} waits for {self._parts.leases.describe_waits(microbatch.positions)}"


def _next_slot(record: _UnitRecord, dp_rank: int) -> int | None:
    """Return the slot that a replica takes next in ``arrival`` order, or None while none is ready."""
    unknown = (slot for slot in record.ready_slots[dp_rank] if not record.microbatches[slot, dp_rank].is_located)
    return min(unknown, default=None)


def _located(microbatch: MicrobatchRecord) -> MicrobatchLocation:
    microbatch.is_located = True
    parts = tuple(
        [
            _place(position, part)
            for position in microbatch.positions
            if not position.rejected
            for part in position.parts
        ]
    )
    rejected = tuple([position.ref.position for position in microbatch.positions if position.rejected])
    return MicrobatchLocation(microbatch.unit, microbatch.slot, microbatch.dp_rank, parts, rejected)


def _place(position: PositionRecord, part: PartRecord) -> PartLocation:
    if part.name != IMAGES_PART:
        return PartLocation(position.ref.position, part.name, part.extents)
    return PartLocation(position.ref.position, part.name, part.extents, position.image_nbytes, position.ref)


def _why(microbatch: MicrobatchRecord | None) -> str:
    if microbatch is None:
        return "it is not planned"
    return "the replica has read it before" if microbatch.is_released else "the replica does not know where it lies"
