"""The parts table: where each part of each position lies, which process produces it, and which may free it.

A part is PENDING, LEASED to an owner, READY at its extents, and RELEASED when the replica that needs it has read it. A
position is SIZED, then PLANNED into a microbatch, and ends once: CONSUMED or REJECTED.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from flowtrain.errors import PoolError, StaleLeaseError
from flowtrain.flow.consumed import ConsumedPositions
from flowtrain.flow.holdings import Holdings
from flowtrain.flow.images import Images
from flowtrain.flow.leases import Leases
from flowtrain.flow.records import LEASED, READY, RELEASED, BatchRecord, LeaseRecord, PartRecord, PositionRecord
from flowtrain.mempool.gva import AddressSpace
from flowtrain.types.events import LedgerRow
from flowtrain.types.memory import Extent, Tier
from flowtrain.types.messages import Lease, PartReady
from flowtrain.types.plan import EncodeBatch, Unit, UnitKind
from flowtrain.types.samples import EVAL_POSITION_BASE, IMAGES_PART, Rejection, SizedSample


class Parts:
    """Exactly-once bookkeeping of a run's positions. The cost of a call depends on the records it touches, not on all.

    Owners are process indices. No index is used again in a run, so messages of a lost owner are recognised.

    space: the pool's address space, to check the reports of owners.
    alignment: of extents in the pool, in bytes; leases are sized by it.
    lease_timeout_s: age at which ``expire_leases`` takes a lease back.
    keeps_batches: as of ``Images``.
    consumed: training positions that an earlier run has consumed.
    ranks_read_images: the backbone's ranks read encoded images, as they read texts; no encoder does.
    clock: returns seconds.
    """

    def __init__(
        self,
        space: AddressSpace,
        *,
        alignment: int,
        lease_timeout_s: float,
        keeps_batches: bool = True,
        consumed: ConsumedPositions | None = None,
        ranks_read_images: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._alignment = alignment
        self._ranks_read_images = ranks_read_images
        self._positions: dict[int, PositionRecord] = {}
        self._eval_frontier = EVAL_POSITION_BASE  # all evaluation positions below are consumed
        self.holdings = Holdings(space, alignment)
        """The READY parts, and what owners may free."""
        self.leases = Leases(lease_timeout_s, clock)
        """The PENDING and LEASED parts."""
        self._images = Images(self.holdings, self.leases, keeps_batches)
        self.consumed = consumed if consumed is not None else ConsumedPositions()
        """Training positions that units of this run, or of the runs that it continues, have consumed."""
        self.has_lost_memory = False
        """Whether a process is gone for good, so that its parts must fit into the segments of the others."""
        self.num_produced = 0
        """Positions whose parts were all READY at one time, each counted once."""

    # --- positions ----------------------------------------------------------------------------------------------

    def add_sized(
        self, samples: Iterable[SizedSample], owner: int, texts: Iterable[PartReady], images: Iterable[PartReady] = ()
    ) -> None:
        """Take in sized positions. Their texts, and the images of those that have some, lie in the owner's segment.

        texts, images: in the order of ``samples``.

        Raises StaleLeaseError for a lost owner, PoolError for a position sized before and for parts of another size.
        """
        is_lost, positions, alignment = self.leases.is_lost(owner), self._positions, self._alignment
        next_images = iter(images)
        for sample, text in zip(samples, texts, strict=True):
            position = sample.ref.position
            if is_lost:
                raise _stale(owner, text, "this process counts as lost")
            if position in positions or self.is_consumed(position):
                raise PoolError(f"position {position} was sized twice; every position is fed once")
            record = PositionRecord.of(sample, alignment, self._ranks_read_images)
            self._make_ready(record.part(text.part), owner, text.extents)
            if record.image_nbytes:
                self._put_images(record, owner, next(next_images).extents)
            positions[position] = record

    def add_batches(self, batches: Iterable[EncodeBatch]) -> None:
        """Put encode batches of sized positions in line; none of them if one has the wrong ``nbytes`` (PoolError)."""
        for record in [self._batch_record(batch) for batch in batches]:
            self.leases.add_batch(record)

    def _batch_record(self, batch: EncodeBatch) -> BatchRecord:
        record = BatchRecord(batch, {position: self[position].part(batch.encoder) for position in batch.positions})
        nbytes = sum([part.aligned_nbytes for part in record.parts.values()])
        if nbytes != batch.nbytes:
            raise PoolError(
                f"unit {batch.unit}, encode batch {batch.index} was planned with {batch.nbytes} bytes; its parts take "
                f"{nbytes} when aligned (pool.alignment)"
            )
        return record

    def __getitem__(self, position: int) -> PositionRecord:
        """Return the record of a position. Raises PoolError if it is not known, or consumed."""
        record = self._positions.get(position)
        if record is None:
            raise PoolError(f"position {position} was neither sized nor rejected, or is consumed")
        return record

    def reject(self, rejection: Rejection, by_reader: bool = False) -> bool:
        """Quarantine a position, sized or not. Its bytes are freed, and nothing waits for it any more.

        Returns False and changes nothing if the position was rejected before (a batch that is encoded again has the
        same bad image), is consumed, or if a rank knows where all of it lies and trains on it.

        by_reader: the replica that knows where it lies has found it bad, and leaves it out.
        """
        position = rejection.ref.position
        record = self._positions.get(position)
        if record is None:
            if self.is_consumed(position):
                return False
            record = self._positions[position] = PositionRecord(rejection.ref)
        if record.rejected or (record.is_handed_out and not by_reader):
            return False
        record.rejected = True
        self.drop(record)
        if record.microbatch is not None and record.missing:
            record.microbatch.one_less_missing()
        return True

    def is_consumed(self, position: int) -> bool:
        """Whether a position is consumed."""
        return position < self._eval_frontier if position >= EVAL_POSITION_BASE else position in self.consumed

    def consumed_among(self, positions: Sequence[int]) -> tuple[int, ...]:
        """Return those of ascending positions that are consumed."""
        if not positions or (not self.consumed.has_ahead and not self.is_consumed(positions[0])):
            return ()  # else a run that was resumed has consumed some
        return tuple([position for position in positions if self.is_consumed(position)])

    def is_rejected(self, position: int) -> bool:
        """Whether a position is quarantined. Raises PoolError if it is not known, or consumed."""
        return self[position].rejected

    def is_done(self, position: int) -> bool:
        """Whether all parts of a position are READY, or it is rejected. Raises PoolError as ``is_rejected``."""
        record = self[position]
        return record.rejected or not record.missing

    def consume(self, unit: Unit) -> tuple[LedgerRow, ...]:
        """Consume the positions of a unit, all of whose microbatches are released. Returns a row for each position.

        Call it for units in their order.
        """
        records = [self._positions.pop(position) for position in unit.positions]
        for record in records:
            for part in record.parts:
                batch = part.batch
                if batch is not None:
                    batch.num_unconsumed -= 1
                    if not batch.num_unconsumed:
                        self.leases.forget_batch(batch)
        if unit.kind is UnitKind.TRAIN:
            self.consumed.add(unit.positions)
        else:
            self._eval_frontier = unit.positions[-1] + 1
        return tuple([record.ledger_row(unit.step) for record in records])

    # --- what owners report -------------------------------------------------------------------------------------

    def ready(self, owner: int, part_ready: PartReady) -> Tier:
        """Take in a part that its leaseholder has put into the pool. Returns the tier that it lies in.

        Raises StaleLeaseError if the owner no longer holds the lease or the position was rejected: free the bytes then.
        Raises PoolError for a wrong size and for extents outside the owner's segment.
        """
        part = self._leased_part(owner, part_ready)
        if part.lease_id != part_ready.epoch:
            raise _stale(owner, part_ready, f"it is leased under epoch {part.lease_id} now")
        return self._make_ready(part, owner, part_ready.extents)

    def remade(self, owner: int, part_ready: PartReady) -> None:
        """Take in a feeder's part that was produced again. Raises as ``ready``; its leases have no epoch."""
        part = self._leased_part(owner, part_ready)
        if part is part.position.images:
            self._images.put_again(part, owner, part_ready.extents)
        else:
            self._make_ready(part, owner, part_ready.extents)

    def expire_leases(self) -> tuple[Lease, ...]:
        """Take back leases that are too old, and return them.

        Parts that were reported under such a lease are produced again with the rest of the batch, unless a rank knows
        where they lie. Otherwise two owners, each holding half a batch, could both run out of room.
        """
        expired = self.leases.expire()
        for record in expired:
            self._evict_reported(record)
        return tuple([record.lease for record in expired])

    def give_back(self, owner: int, lease_id: int) -> None:
        """Take back a lease that its owner cannot work on, as ``expire_leases``. It may hold it no longer."""
        record = self.leases.give_back(owner, lease_id)
        if record is not None:
            self._evict_reported(record)

    def drop(self, position: PositionRecord) -> None:
        """Release all parts of a position that no rank needs any more, and images that encoders no longer need."""
        for part in position.parts:
            if part.state is RELEASED:
                continue
            if part.state is READY:
                self.holdings.release(part)
            else:
                self.leases.leave(part)
            part.state = RELEASED
            part.extents = ()
            if part.batch is not None:
                part.batch.num_unread -= 1
        if position.images is not None:
            self._images.position_over(position)

    # --- losses -------------------------------------------------------------------------------------------------

    def take_over(self, earlier: Parts) -> None:
        """Go on with the owners of an earlier flow, all of whose parts are released."""
        self.has_lost_memory = earlier.has_lost_memory
        self.leases.take_over(earlier.leases)
        self.holdings.take_over(earlier.holdings)

    def owner_lost(self, owner: int, for_good: bool = False) -> None:
        """Have all parts of an owner that are not released produced again, first in line. May be called twice.

        for_good: no new process takes its place, so eviction may be needed from now on.
        """
        self.has_lost_memory |= for_good
        self.leases.owner_lost(owner)
        for part in self.holdings.lose(owner):
            if part is part.position.images:
                self._images.lose(part)
            else:
                self._make_pending(part)

    def evict(self, part: PartRecord) -> None:
        """Have the owner free a READY part, and have it produced again in line."""
        self.holdings.release(part)
        self._make_pending(part)

    # --- inside -------------------------------------------------------------------------------------------------

    def _put_images(self, record: PositionRecord, owner: int, extents: tuple[Extent, ...]) -> None:
        if record.images is not None:
            self._images.put(record.images, owner, extents)
        else:
            self._make_ready(record.part(IMAGES_PART), owner, extents)

    def _leased_part(self, owner: int, part_ready: PartReady) -> PartRecord:
        record = self._positions.get(part_ready.position)
        if self.leases.is_lost(owner):
            raise _stale(owner, part_ready, "this process counts as lost")
        if record is None or record.rejected:
            raise _stale(owner, part_ready, "the position was rejected, or is consumed")
        part = record.part(part_ready.part)
        if part.state is not LEASED or part.owner != owner:
            holder = f" to process {part.owner}" if part.state is LEASED else ""
            raise _stale(owner, part_ready, f"it is {part.state.value}{holder}")
        return part

    def _make_ready(self, part: PartRecord, owner: int, extents: tuple[Extent, ...]) -> Tier:
        """Take in a text or features; its position may then be complete."""
        tier = self.holdings.tier_of(part, owner, extents)
        if part.state is LEASED:
            self.leases.leave(part)
        self.holdings.put(part, owner, extents, tier)
        position = part.position
        position.missing -= 1
        if position.missing:
            return tier
        if not position.produced:
            position.produced = True
            self.num_produced += 1
        if position.microbatch is not None:
            position.microbatch.one_less_missing()
        return tier

    def _make_pending(self, part: PartRecord) -> None:
        """Have a part that was READY produced again; its position is then incomplete."""
        position = part.position
        position.missing += 1
        if position.missing == 1 and position.microbatch is not None:
            position.microbatch.one_more_missing()
        self.leases.make_pending(part)

    def _evict_reported(self, record: LeaseRecord) -> None:
        """Have parts that were reported under a lease produced again with the rest, unless a rank knows their place."""
        lease_id = record.lease.lease_id
        for part in record.batch.parts.values():
            if part.state is READY and part.lease_id == lease_id and not part.position.is_located:
                self.evict(part)


def _stale(owner: int, part_ready: PartReady, why: str) -> StaleLeaseError:
    return StaleLeaseError(
        f"process {owner} reports {part_ready.part} of position {part_ready.position} under epoch "
        f"{part_ready.epoch}, which is refused: {why}; free its bytes"
    )
