"""The directory: which part of which position lies where, who makes it, who may free it.

A part is PENDING, LEASED to an owner, READY at its extents, and RELEASED when the backbone is done with it; a position
is SIZED, PLANNED into a microbatch, and ends CONSUMED or REJECTED, once. Nothing here does I/O or waits; the clock is
given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from flowtrain.errors import PoolError, StaleLeaseError
from flowtrain.mempool.consumed import ConsumedPositions
from flowtrain.mempool.directory_plan import batch_record, build_unit
from flowtrain.mempool.directory_records import PartRecord, PartState, PositionRecord
from flowtrain.mempool.directory_waits import describe_microbatch, describe_parts, waiting_parts
from flowtrain.mempool.gva import AddressSpace
from flowtrain.mempool.lease_book import LeaseBook
from flowtrain.mempool.part_book import PartBook
from flowtrain.mempool.unit_book import UnitBook
from flowtrain.types.events import LedgerRow
from flowtrain.types.memory import Extent, Tier
from flowtrain.types.messages import Lease, MicrobatchLocation, PartReady
from flowtrain.types.plan import EncodeBatch, StepPlan, UnitKind
from flowtrain.types.samples import EVAL_POSITION_BASE, Rejection, SampleRef, SizedSample


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
        self._alignment = alignment
        self._positions: dict[int, PositionRecord] = {}
        self._leases = LeaseBook(self._aligned, lease_timeout_s, clock)
        self._parts = PartBook(space, self._leases, self._aligned)
        self._units = UnitBook()
        self._lost_owners: set[int] = set()
        self._eval_frontier = EVAL_POSITION_BASE  # the evaluation positions below are over
        self.consumed = consumed if consumed is not None else ConsumedPositions()
        """Training positions that units have consumed, in this run or in those that it continues."""
        self.has_lost_memory = False
        """Whether a process is gone for good, so that what it held has to fit beside what the others hold."""
        self.num_consumed = 0
        """Positions that a unit has consumed."""
        self.num_rejected = 0
        """Positions that were quarantined."""

    @property
    def num_produced(self) -> int:
        """Positions whose parts have all been READY, each counted once."""
        return self._parts.num_produced

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
        self._parts.make_ready(record.part(text.part), owner, text.extents)
        self._positions[position] = record

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
        self._units.add(unit)
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
            self._parts.drop(part)
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
        """Take back the leases that are too old, and return them.

        What was reported under one is made again with the rest, unless a rank was told to read it: two owners that hold
        half a batch each may both lack room for another, though all were to fit.
        """
        return self._parts.expire_leases()

    def ready(self, owner: int, part_ready: PartReady) -> Tier:
        """Take in a part that its leaseholder has put; returns the tier that it lies in.

        Raises StaleLeaseError if the lease is no longer the owner's or the position was rejected (free the bytes),
        PoolError for a wrong size and for extents outside the owner's segment.
        """
        part = self._leased_part(owner, part_ready)
        if part.lease_id != part_ready.epoch:
            raise self._stale(owner, part_ready, f"it is leased under epoch {part.lease_id} now")
        return self._parts.make_ready(part, owner, part_ready.extents)

    def text_ready(self, owner: int, part_ready: PartReady) -> None:
        """Take in a text part that was made again; errors as ``ready``, though leases of text have no epoch."""
        self._parts.make_ready(self._leased_part(owner, part_ready), owner, part_ready.extents)

    def take_released(self, owner: int) -> tuple[Extent, ...]:
        """Hand an owner the extents that it may free, each once."""
        return self._parts.take_released(owner)

    def released_nbytes(self, owner: int) -> int:
        """Return what an owner's DRAM segment gains by freeing what ``take_released`` has for it."""
        return self._parts.released_nbytes(owner)

    def owner_lost(self, owner: int, for_good: bool = False) -> None:
        """An owner died: its parts that are not released are made again, first in line. May be said twice.

        for_good: no other process takes its place, so that from now on ``make_room`` may be needed.
        """
        self.has_lost_memory |= for_good
        self._lost_owners.add(owner)
        self._leases.owner_lost(owner)
        self._parts.lose(owner)

    def may_evict(self, owner: int, encoder: str) -> bool:
        """Whether ``make_room`` may work: a batch is in line, memory was lost for good, and nobody encodes any more."""
        if not self.has_lost_memory or owner in self._lost_owners or self._leases.is_out(encoder):
            return False
        return self._leases.first_in_line(encoder) is not None

    def make_room(self, owner: int, encoder: str, free_nbytes: int) -> bool:
        """Evict parts from an owner's segment for the first batch in line, which does not fit into ``free_nbytes``.

        Only where ``may_evict`` says so: the survivors of a loss can be full of later positions. The parts are made
        again in their turn; ``take_released`` has their extents. Returns whether anything was evicted.
        """
        blocked = self._leases.first_in_line(encoder)
        if blocked is None or not self.may_evict(owner, encoder):
            return False
        return self._parts.make_room(owner, blocked, self._leases.pending_nbytes(blocked) - free_nbytes)

    # --- the backbone -------------------------------------------------------------------------------------------

    def is_ready(self, unit: int, slot: int, dp_rank: int) -> bool:
        """Whether a microbatch may run: all its positions are complete or rejected."""
        return self._units.is_ready(unit, slot, dp_rank)

    def ready_slots(self, unit: int, dp_rank: int) -> tuple[int, ...]:
        """Return the slots of a rank that may run and are not released, in the plan's order."""
        return self._units.ready_slots(unit, dp_rank)

    def locate(self, unit: int, slot: int, dp_rank: int) -> MicrobatchLocation | None:
        """Return where a microbatch's parts lie now, or None while it is not ready; may be asked again."""
        return self._units.locate(unit, slot, dp_rank)

    def release(self, unit: int, slot: int, dp_rank: int) -> None:
        """A rank has read a microbatch that it located: its bytes may be freed, lost ones need not be made again.

        Raises PoolError for one that was never located, or released before.
        """
        for position in self._units.release(unit, slot, dp_rank).positions:
            for part in position.parts.values():
                self._parts.drop(part)

    def consume(self, unit_index: int) -> tuple[LedgerRow, ...]:
        """End a unit: return a row for each of its positions, and forget all about it.

        Raises PoolError if it is not planned, or a microbatch of it is not released.
        """
        unit = self._units.end(unit_index).unit
        records = [self._positions.pop(position) for position in unit.positions]
        rows = tuple([record.ledger_row(unit.step) for record in records])
        for record in records:
            self._leases.consumed(record)
        if unit.kind is UnitKind.TRAIN:
            self.consumed.add(unit.positions)
        else:
            self._eval_frontier = unit.positions[-1] + 1
        self.num_consumed += sum(not record.rejected for record in records)
        return rows

    def occupancy(self) -> dict[Tier, int]:
        """Return the bytes of READY parts in each tier."""
        return self._parts.occupancy()

    def describe_wait(self, unit: int, slot: int, dp_rank: int) -> str:
        """Say what a microbatch waits for: each part, its state, who has it and for how long."""
        record = self._units.microbatch(unit, slot, dp_rank)
        return f"unit {unit}, slot {slot}, rank {dp_rank} {describe_microbatch(record, self._leases)}"

    def describe_positions(self, positions: Iterable[int]) -> str:
        """Say what positions wait for, as ``describe_wait``."""
        return describe_parts(waiting_parts(self._known(position) for position in positions), self._leases)

    # --- inside -------------------------------------------------------------------------------------------------

    def _leased_part(self, owner: int, part_ready: PartReady) -> PartRecord:
        record = self._positions.get(part_ready.position)
        if owner in self._lost_owners:
            raise self._stale(owner, part_ready, "this process counts as lost")
        if record is None or record.rejected:
            raise self._stale(owner, part_ready, "the position was rejected, or is over")
        part = record.part(part_ready.part)
        if part.state is not PartState.LEASED or part.owner != owner:
            holder = f" to process {part.owner}" if part.state is PartState.LEASED else ""
            raise self._stale(owner, part_ready, f"it is {part.state.value}{holder}")
        return part

    def _known(self, position: int) -> PositionRecord:
        record = self._positions.get(position)
        if record is None:
            raise PoolError(f"position {position} was neither sized nor rejected, or is consumed")
        return record

    def _aligned(self, nbytes: int) -> int:
        return -(-nbytes // self._alignment) * self._alignment

    def _stale(self, owner: int, part_ready: PartReady, why: str) -> StaleLeaseError:
        return StaleLeaseError(
            f"process {owner} reports {part_ready.part} of position {part_ready.position} under epoch "
            f"{part_ready.epoch}, which is refused: {why}; free its bytes"
        )
