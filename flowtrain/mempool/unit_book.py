"""Which microbatch of which planned unit may run, is being read, or is released.

The directory's half that looks at the backbone.
"""

from __future__ import annotations

from flowtrain.errors import PoolError
from flowtrain.mempool.directory_records import MicrobatchRecord, UnitRecord
from flowtrain.types.messages import MicrobatchLocation, PartLocation


class UnitBook:
    """Planned units until they are consumed."""

    def __init__(self) -> None:
        self._units: dict[int, UnitRecord] = {}

    def __contains__(self, unit: int) -> bool:
        return unit in self._units

    def add(self, record: UnitRecord) -> None:
        """Take in a unit that was not planned before."""
        self._units[record.unit.index] = record

    def microbatch(self, unit: int, slot: int, dp_rank: int) -> MicrobatchRecord | None:
        """Return the record of a microbatch, or None where it is not planned."""
        record = self._units.get(unit)
        return record.microbatches.get((slot, dp_rank)) if record is not None else None

    def is_ready(self, unit: int, slot: int, dp_rank: int) -> bool:
        """Whether a microbatch may run: all its positions are complete or rejected."""
        record = self._units.get(unit)
        return record is not None and slot in record.ready[dp_rank]

    def ready_slots(self, unit: int, dp_rank: int) -> tuple[int, ...]:
        """Return the slots of a rank that may run and are not released, in the plan's order."""
        record = self._units.get(unit)
        return tuple(sorted(record.ready[dp_rank])) if record is not None else ()

    def locate(self, unit: int, slot: int, dp_rank: int) -> MicrobatchLocation | None:
        """Return where a microbatch's parts lie now, or None while it is not ready; may be asked again."""
        if not self.is_ready(unit, slot, dp_rank):
            return None
        record = self._units[unit].microbatches[slot, dp_rank]
        record.located = True
        parts = tuple(
            [
                PartLocation(position.ref.position, part.name, part.extents)
                for position in record.positions
                if not position.rejected
                for part in position.parts.values()
            ]
        )
        rejected = tuple([position.ref.position for position in record.positions if position.rejected])
        return MicrobatchLocation(unit, slot, dp_rank, parts, rejected)

    def release(self, unit: int, slot: int, dp_rank: int) -> MicrobatchRecord:
        """A rank has no more need of a microbatch's bytes; PoolError for one never located, or released before."""
        record = self.microbatch(unit, slot, dp_rank)
        if record is None or not record.located or record.released:
            what = "is not planned" if record is None else "was released before" if record.released else "never located"
            raise PoolError(f"unit {unit}, slot {slot}, rank {dp_rank} cannot be released: it {what}")
        record.released = True
        record.unit.unreleased -= 1
        record.unit.ready[dp_rank].discard(slot)
        return record

    def end(self, unit: int) -> UnitRecord:
        """Forget a unit. Raises PoolError if it is not planned, or a microbatch of it is not released."""
        record = self._units.get(unit)
        if record is None or record.unreleased:
            what = (
                "it is not planned" if record is None else f"{record.unreleased} of its microbatches are not released"
            )
            raise PoolError(f"unit {unit} cannot be consumed: {what}")
        return self._units.pop(unit)
