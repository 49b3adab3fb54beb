"""The directory: which part of which position lies where, who makes it, who may free it.

A part is PENDING, LEASED to an owner, READY at its extents, and RELEASED when the backbone is done with it; a position
is SIZED, PLANNED into a microbatch, and ends CONSUMED or REJECTED, once. Nothing here does I/O or waits; the clock is
given.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable

from flowtrain.errors import PoolError, StaleLeaseError
from flowtrain.mempool.consumed import ConsumedPositions
from flowtrain.mempool.directory_plan import batch_record, build_unit
from flowtrain.mempool.directory_records import (
    MicrobatchRecord,
    PartRecord,
    PartState,
    PositionRecord,
    UnitRecord,
)
from flowtrain.mempool.eviction import farthest_parts
from flowtrain.mempool.gva import AddressSpace
from flowtrain.mempool.lease_book import LeaseBook
from flowtrain.types import (
    EVAL_POSITION_BASE,
    EncodeBatch,
    Extent,
    Lease,
    LedgerRow,
    MicrobatchLocation,
    PartLocation,
    PartReady,
    Rejection,
    SampleRef,
    SizedSample,
    StepPlan,
    Tier,
    UnitKind,
)

_DESCRIBED_PARTS = 8


class Directory:
    """Exactly-once bookkeeping of a run's positions; every call costs what it touches, not what there is.

    space, alignment: of the pool, to check what owners report and to size leases. lease_timeout_s: age at which
    ``expire_leases`` takes a lease back. Owners are process indices, which are never used again in a run, so a message
    of a lost owner is known for what it is. consumed: training positions that an earlier run has consumed. Units are
    consumed in their order.
    """

    def __init__(
        self,
        space: AddressSpace,
        *,
        alignment: int,
        lease_timeout_s: float,
        consumed: ConsumedPositions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._space = space
        self._alignment = alignment
        self._positions: dict[int, PositionRecord] = {}
        self._units: dict[int, UnitRecord] = {}
        self._leases = LeaseBook(self._aligned, lease_timeout_s, clock)
        self._ready_of: defaultdict[int, set[PartRecord]] = defaultdict(set)
        self._released_of: defaultdict[int, list[Extent]] = defaultdict(list)
        self._lost_owners: set[int] = set()
        self._has_lost_memory = False
        self._ready_nbytes = dict.fromkeys(Tier, 0)
        self.consumed = consumed if consumed is not None else ConsumedPositions()
        """Training positions that units have consumed, in this run or in those that it continues."""
        self._eval_frontier = EVAL_POSITION_BASE  # the evaluation positions below are over
        self.num_produced = 0
        """Positions whose parts have all been READY, each counted once."""
        self.num_consumed = 0
        """Positions that a unit has consumed."""
        self.num_rejected = 0
        """Positions that were quarantined."""

    # --- sizing, planning, rejecting ----------------------------------------------------------------------------

    def add_sized(self, sample: SizedSample, owner: int, text: PartReady) -> None:
        """Take in a position whose sizes are known and whose text lies in the owner's segment already.

        Raises StaleLeaseError for a lost owner, PoolError for a position known before and for text of another size.
        """
        position = sample.ref.position
        if owner in self._lost_owners:
            raise self._stale(owner, text, "this process counts as lost")
        if position in self._positions or self.is_consumed(position):
            raise PoolError(f"position {position} was sized twice; every position is fed once")
        record = PositionRecord.of(sample)
        part = _part(record, text)
        tier = self._check_extents(owner, part, text.extents)
        self._positions[position] = record
        self._make_ready(part, owner, text.extents, tier)

    def add_batches(self, batches: Iterable[EncodeBatch]) -> None:
        """Put encode batches of sized positions in line before any plan has them (``arrival`` order)."""
        for batch in batches:
            self._leases.add_batch(batch_record(batch, self._known, self._aligned))

    def add_plan(self, plan: StepPlan) -> None:
        """Take in a unit's plan: its microbatches, and encode batches of what is in none yet.

        Raises PoolError where it does not fit.
        """
        if plan.unit.index in self._units:
            raise PoolError(f"unit {plan.unit.index} was planned twice")
        unit, batches = build_unit(plan, self._known, self._aligned)
        self._units[plan.unit.index] = unit
        for record in batches:
            self._leases.add_batch(record)

    def reject(self, rejection: Rejection) -> bool:
        """Quarantine a position, sized or not; its bytes are freed and nobody waits for it any more.

        Returns False, changing nothing, if it was rejected before (a batch encoded again meets the same bad image), is
        consumed, or was handed out whole to a rank, which trains on it.
        """
        position = rejection.ref.position
        record = self._positions.get(position)
        if record is None:
            if self.is_consumed(position):
                return False
            record = self._positions[position] = PositionRecord(rejection.ref)
        if record.rejected or record.is_handed_out:
            return False
        record.rejected = True
        self.num_rejected += 1
        for part in record.parts.values():
            self._drop(part)
        if record.microbatch is not None and record.missing:
            record.microbatch.one_less_missing()
        return True

    def is_consumed(self, position: int) -> bool:
        """Whether a position is over."""
        return position < self._eval_frontier if position >= EVAL_POSITION_BASE else position in self.consumed

    def is_rejected(self, position: int) -> bool:
        """Whether a position is quarantined; raises PoolError for one that is not known, or over."""
        return self._known(position).rejected

    def is_done(self, position: int) -> bool:
        """Whether nobody has to make anything for a position, now: it is complete, or rejected; errors as above."""
        record = self._known(position)
        return record.rejected or not record.missing

    # --- leases and reports of owners ---------------------------------------------------------------------------

    def lease(self, owner: int, encoder: str, free_nbytes: int) -> Lease | None:
        """Lease the first batch in line to an owner, strictly in (unit, batch index) order.

        A batch whose parts were lost comes before all later ones, and only its lost parts need room. None if nothing is
        in line, or if the first does not fit into ``free_nbytes``: no later, smaller one goes before it, so that the
        earliest unfinished unit gets its memory. A lost owner gets none.
        """
        return None if owner in self._lost_owners else self._leases.lease(owner, encoder, free_nbytes)

    def lost_text(self, owner: int) -> tuple[SampleRef, ...]:
        """Lease all text parts that were lost to an owner, to be made again; in order of position."""
        return () if owner in self._lost_owners else self._leases.lease_lost_text(owner)

    def expire_leases(self) -> tuple[Lease, ...]:
        """Take back the leases that are too old, and return them; what was reported under them stays."""
        return self._leases.expire()

    def ready(self, owner: int, part_ready: PartReady) -> None:
        """Take in a part that its leaseholder has put.

        Raises StaleLeaseError if the lease is no longer the owner's or the position was rejected (free the bytes),
        PoolError for a wrong size and for extents outside the owner's segment.
        """
        part = self._leased_part(owner, part_ready)
        if part.lease_id != part_ready.epoch:
            raise self._stale(owner, part_ready, f"it is leased under epoch {part.lease_id} now")
        tier = self._check_extents(owner, part, part_ready.extents)
        self._leases.leave(part)
        self._make_ready(part, owner, part_ready.extents, tier)

    def text_ready(self, owner: int, part_ready: PartReady) -> None:
        """Take in a text part that was made again; errors as ``ready``, though leases of text have no epoch."""
        part = self._leased_part(owner, part_ready)
        tier = self._check_extents(owner, part, part_ready.extents)
        self._leases.leave(part)
        self._make_ready(part, owner, part_ready.extents, tier)

    def take_released(self, owner: int) -> tuple[Extent, ...]:
        """Hand an owner the extents that it may free, each once."""
        return tuple(self._released_of.pop(owner, ()))

    def owner_lost(self, owner: int, for_good: bool = False) -> None:
        """An owner died: its parts that are not released are made again, first in line. May be said twice.

        for_good: no other process takes its place, so that from now on ``make_room`` may be needed.
        """
        self._has_lost_memory |= for_good
        self._lost_owners.add(owner)
        self._released_of.pop(owner, None)
        self._leases.owner_lost(owner)
        for part in self._ready_of.pop(owner, ()):
            self._unmake(part)

    def make_room(self, owner: int, encoder: str, free_nbytes: int) -> bool:
        """Evict parts from an owner's segment for the first batch in line, which does not fit into ``free_nbytes``.

        Only where memory was lost for good and nobody encodes any more, so that the survivors can be full of later
        positions. The parts are made again when their turn comes; ``take_released`` has their extents. Returns whether
        anything was evicted.
        """
        blocked = self._leases.first_in_line(encoder)
        if blocked is None or not self._has_lost_memory or owner in self._lost_owners or self._leases.is_out(encoder):
            return False
        lacking_nbytes = self._leases.pending_nbytes(blocked) - free_nbytes
        evicted = farthest_parts(self._ready_of.get(owner, ()), blocked, lacking_nbytes, self._aligned)
        for part in evicted:
            self._ready_of[owner].remove(part)
            self._released_of[owner].extend(part.extents)
            self._unmake(part)
        return bool(evicted)

    # --- the backbone -------------------------------------------------------------------------------------------

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
            PartLocation(position.ref.position, part.name, part.extents)
            for position in record.positions
            if not position.rejected
            for part in position.parts.values()
        )
        rejected = tuple(position.ref.position for position in record.positions if position.rejected)
        return MicrobatchLocation(unit, slot, dp_rank, parts, rejected)

    def release(self, unit: int, slot: int, dp_rank: int) -> None:
        """A rank is done with a microbatch that it located: its bytes may be freed, lost ones need not be made again.

        Raises PoolError for one that was never located, or released before.
        """
        record = self._microbatch(unit, slot, dp_rank)
        if record is None or not record.located or record.released:
            what = "is not planned" if record is None else "was released before" if record.released else "never located"
            raise PoolError(f"unit {unit}, slot {slot}, rank {dp_rank} cannot be released: it {what}")
        record.released = True
        record.unit.unreleased -= 1
        record.unit.ready[dp_rank].discard(slot)
        for position in record.positions:
            for part in position.parts.values():
                self._drop(part)

    def consume(self, unit_index: int) -> tuple[LedgerRow, ...]:
        """End a unit: return a row for each of its positions, and forget all about it.

        Raises PoolError if it is not planned, or a microbatch of it is not released.
        """
        unit = self._units.get(unit_index)
        if unit is None or unit.unreleased:
            what = "it is not planned" if unit is None else f"{unit.unreleased} of its microbatches are not released"
            raise PoolError(f"unit {unit_index} cannot be consumed: {what}")
        positions, step = unit.unit.positions, unit.unit.step
        rows = tuple(self._known(position).ledger_row(step) for position in positions)
        for position in positions:
            self._leases.consumed(self._positions.pop(position))
        del self._units[unit_index]
        if unit.unit.kind is UnitKind.TRAIN:
            self.consumed.add(positions)
        else:
            self._eval_frontier = positions[-1] + 1
        self.num_consumed += sum(row.state == "consumed" for row in rows)
        return rows

    def occupancy(self) -> dict[Tier, int]:
        """Return the bytes of READY parts in each tier."""
        return dict(self._ready_nbytes)

    def describe_wait(self, unit: int, slot: int, dp_rank: int) -> str:
        """Say what a microbatch waits for: each part, its state, who has it and for how long."""
        where = f"unit {unit}, slot {slot}, rank {dp_rank}"
        record = self._microbatch(unit, slot, dp_rank)
        if record is None:
            return f"{where} is not planned"
        waiting = _waiting_parts(record.positions)
        if record.released or not waiting:
            return f"{where} is {'released' if record.released else 'ready'}"
        return f"{where} waits for {self._describe_all(waiting)}"

    def describe_positions(self, positions: Iterable[int]) -> str:
        """Say what positions wait for, as ``describe_wait``."""
        return self._describe_all(_waiting_parts(self._known(position) for position in positions))

    # --- inside -------------------------------------------------------------------------------------------------

    def _make_ready(self, part: PartRecord, owner: int, extents: tuple[Extent, ...], tier: Tier) -> None:
        part.state = PartState.READY
        part.owner = owner
        part.extents = extents
        part.tier = tier
        self._ready_of[owner].add(part)
        self._ready_nbytes[tier] += part.nbytes
        position = part.position
        position.missing -= 1
        if position.missing:
            return
        if not position.produced:
            position.produced = True
            self.num_produced += 1
        if position.microbatch is not None:
            position.microbatch.one_less_missing()

    def _unmake(self, part: PartRecord) -> None:
        """A READY part is gone, and has to be made again."""
        self._ready_nbytes[part.tier] -= part.nbytes
        position = part.position
        position.missing += 1
        if position.missing == 1 and position.microbatch is not None:
            position.microbatch.one_more_missing()
        self._leases.make_pending(part)

    def _drop(self, part: PartRecord) -> None:
        """A part is not wanted any more, whatever its state."""
        if part.state is PartState.READY:
            self._ready_of[part.owner].discard(part)
            self._ready_nbytes[part.tier] -= part.nbytes
            self._released_of[part.owner].extend(part.extents)
        elif part.state is not PartState.RELEASED:
            self._leases.leave(part)
        part.state = PartState.RELEASED
        part.extents = ()

    def _leased_part(self, owner: int, part_ready: PartReady) -> PartRecord:
        record = self._positions.get(part_ready.position)
        if owner in self._lost_owners:
            raise self._stale(owner, part_ready, "this process counts as lost")
        if record is None or record.rejected:
            raise self._stale(owner, part_ready, "the position was rejected, or is over")
        part = _part(record, part_ready)
        if part.state is not PartState.LEASED or part.owner != owner:
            holder = f" to process {part.owner}" if part.state is PartState.LEASED else ""
            raise self._stale(owner, part_ready, f"it is {part.state.value}{holder}")
        return part

    def _check_extents(self, owner: int, part: PartRecord, extents: tuple[Extent, ...]) -> Tier:
        """Check a reported part against its size and its owner's segment; returns its tier."""
        nbytes, tier = 0, Tier.DRAM
        for extent in extents:
            nbytes += extent.nbytes
            place = self._space.place(extent)
            tier = place.tier
            if place.process_index != owner:
                raise PoolError(
                    f"process {owner} reports {part.name} of position {part.position.ref.position} at {extent.gva:#x}, "
                    f"which belongs to process {place.process_index}"
                )
        if nbytes != part.nbytes:
            raise PoolError(
                f"position {part.position.ref.position}: its {part.name} was sized as {part.nbytes} bytes, process "
                f"{owner} put {nbytes}; the model's processing does not do what its sizing says"
            )
        return tier

    def _known(self, position: int) -> PositionRecord:
        record = self._positions.get(position)
        if record is None:
            raise PoolError(f"position {position} was neither sized nor rejected, or is consumed")
        return record

    def _microbatch(self, unit: int, slot: int, dp_rank: int) -> MicrobatchRecord | None:
        record = self._units.get(unit)
        return record.microbatches.get((slot, dp_rank)) if record is not None else None

    def _aligned(self, nbytes: int) -> int:
        return -(-nbytes // self._alignment) * self._alignment

    def _stale(self, owner: int, part_ready: PartReady, why: str) -> StaleLeaseError:
        return StaleLeaseError(
            f"process {owner} reports {part_ready.part} of position {part_ready.position} under epoch "
            f"{part_ready.epoch}, which is refused: {why}; free its bytes"
        )

    def _describe_all(self, waiting: list[PartRecord]) -> str:
        if not waiting:
            return "nothing"
        shown = "; ".join(self._describe(part) for part in waiting[:_DESCRIBED_PARTS])
        more = f"; and {len(waiting) - _DESCRIBED_PARTS} more" if len(waiting) > _DESCRIBED_PARTS else ""
        return f"{len(waiting)} parts: {shown}{more}"

    def _describe(self, part: PartRecord) -> str:
        what = f"{part.name} of position {part.position.ref.position} ({part.nbytes} bytes) is"
        if part.state is PartState.LEASED:
            age = f" for {self._leases.age_s(part.lease_id):.1f} s (lease {part.lease_id})" if part.batch else ""
            return f"{what} leased to process {part.owner}{age}"
        if part.batch is None:
            return f"{what} pending: lost with its owner and to be made again"
        batch = part.batch.batch
        first = self._leases.first_in_line(batch.encoder)
        head = (
            f", behind batch {first.batch.index} of unit {first.batch.unit}" if first not in (None, part.batch) else ""
        )
        return f"{what} pending in encode batch {batch.index} of unit {batch.unit}{head}: no encoder has room or asks"


def _waiting_parts(positions: Iterable[PositionRecord]) -> list[PartRecord]:
    return [
        part
        for position in positions
        if position.missing and not position.rejected
        for part in position.parts.values()
        if part.state is not PartState.READY
    ]


def _part(record: PositionRecord, part_ready: PartReady) -> PartRecord:
    part = record.parts.get(part_ready.part)
    if part is None:
        raise PoolError(
            f"position {part_ready.position} has no part {part_ready.part!r}; it has {', '.join(record.parts)}"
        )
    return part
