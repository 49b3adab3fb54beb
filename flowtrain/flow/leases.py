"""Which process produces which part: encode batches in line, granted leases, lost parts of feeders."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable

from flowtrain.flow.records import (
    LEASED,
    NOBODY,
    PENDING,
    READY,
    RELEASED,
    BatchKey,
    BatchRecord,
    LeaseRecord,
    PartRecord,
    PositionRecord,
)
from flowtrain.types.messages import ImageBytes, Lease, Remake
from flowtrain.types.plan import EncodeBatch
from flowtrain.types.samples import FED_PARTS, SampleRef

_DESCRIBED_PARTS = 8


class Leases:
    """Holds the PENDING and LEASED parts. Batches are leased strictly in the order of (unit, batch index).

    Each lease has a new id, also when its batch is leased again. So the id is the epoch of reports under the lease.

    timeout_s: age at which ``expire`` takes a lease back.
    clock: returns seconds.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._lines: defaultdict[str, list[BatchKey]] = defaultdict(list)
        self._batches: dict[tuple[str, int, int], BatchRecord] = {}
        self._leases: dict[int, LeaseRecord] = {}  # in the order in which they were granted
        self._leases_of: defaultdict[int, set[int]] = defaultdict(set)
        self._last_id = 0
        self._last_earlier_id = 0
        self._last_earlier_of: dict[int, int] = {}  # of owners that may still work under leases of an earlier flow
        self._feeders: dict[int, int] = {}
        self._lost_fed: defaultdict[int, set[PartRecord]] = defaultdict(set)  # by feeder
        self._remade_by: defaultdict[int, set[PartRecord]] = defaultdict(set)  # by owner
        self._lost_owners: set[int] = set()
        self.on_unleased: Callable[[BatchRecord], None] = lambda batch: None
        """Called when no lease of a batch is left that has kept images."""
        self.name_of: Callable[[int], str] = lambda owner: f"process {owner}"
        """Returns what messages call an owner."""
        self.on_done: Callable[[int, EncodeBatch, float], None] = lambda owner, batch, seconds: None
        """Called with the owner of a lease of a whole batch that was produced, and the seconds since it was granted."""

    def add_feeder(self, owner: int, feeder: int) -> None:
        """Note that an owner is the process of a feeder; what the owner loses is produced again by that feeder."""
        self._feeders[owner] = feeder

    def add_batch(self, record: BatchRecord) -> None:
        """Put a batch in line, with its PENDING parts."""
        for position, part in record.parts.items():
            part.batch = record
            if part.state is PENDING:
                record.pending.add(position)
            if part.state is not RELEASED:
                record.num_unread += 1
                images = part.position.images
                record.num_unfed += images is not None and images.state is not READY
        self._batches[record.batch.encoder, *record.key] = record
        self._queue(record)

    def take_over(self, earlier: Leases) -> None:
        """Go on with the owners of an earlier flow; none of its leases counts any more."""
        self._last_id = self._last_earlier_id = earlier._last_id
        held = {owner: max(lease_ids) for owner, lease_ids in earlier._leases_of.items() if lease_ids}
        self._last_earlier_of = earlier._last_earlier_of | held
        self._feeders = earlier._feeders
        self._lost_owners = earlier._lost_owners

    def is_earlier(self, lease_id: int) -> bool:
        """Whether a lease was granted by the flow that this one took over from."""
        return 0 < lease_id <= self._last_earlier_id

    @property
    def has_line(self) -> bool:
        """Whether a batch may be in line, for any encoder."""
        return any(self._lines.values())

    def first_in_line(self, encoder: str) -> BatchRecord | None:
        """Return the earliest batch that must be encoded, or None."""
        line = self._lines[encoder]
        while line:
            record = self._batches.get((encoder, *line[0]))
            if record is not None:
                if record.pending:
                    return record
                record.is_queued = False
            heapq.heappop(line)
        return None

    def grant(self, owner: int, encoder: str, free_nbytes: int) -> Lease | None:
        """Lease the first batch in line to an owner if its needed parts fit into ``free_nbytes``.

        A batch whose parts were lost comes before all later ones, and only its lost parts need room. Returns None if
        no batch is in line, if the first one does not fit or waits for images, or for a lost owner. No later, smaller
        batch goes first, so that the earliest unfinished unit gets its memory.
        """
        record = self.first_in_line(encoder) if owner not in self._lost_owners else None
        if record is None or record.num_unfed:
            return None
        needed, nbytes = record.batch.positions, record.batch.nbytes
        if len(record.pending) < len(needed):
            needed, nbytes = tuple(p for p in needed if p in record.pending), pending_nbytes(record)
        if nbytes > free_nbytes:
            return None
        heapq.heappop(self._lines[encoder])
        record.is_queued = False
        record.pending.clear()
        self._last_id += 1
        lease_id = self._last_id
        for position in needed:
            part = record.parts[position]
            part.state = LEASED
            part.owner = owner
            part.lease_id = lease_id
        refs, images = _images_of(record)
        lease = Lease(lease_id, lease_id, record.batch, refs, images, needed, nbytes)
        record.num_leases += 1
        self._leases[lease_id] = LeaseRecord(lease, owner, record, self._clock())
        self._leases_of[owner].add(lease_id)
        return lease

    def handed_in(self, owner: int, lease_id: int) -> None:
        """Note that an owner has finished a lease, and so all that it got before."""
        last = self._last_earlier_of.get(owner)
        if last is not None and lease_id >= last:
            del self._last_earlier_of[owner]

    def is_idle(self, owner: int) -> bool:
        """Whether an owner holds no lease, and works under none of an earlier flow."""
        return not self._leases_of.get(owner) and owner not in self._last_earlier_of

    def is_granted(self, encoder: str) -> bool:
        """Whether any owner holds a lease of this encoder's batches."""
        return any(record.lease.batch.encoder == encoder for record in self._leases.values())

    def grant_lost_parts(self, owner: int) -> tuple[Remake, ...]:
        """Lease all lost parts of a feeder to its present process, which produces them again; in order of position."""
        if owner in self._lost_owners:
            return ()
        lost = self._lost_fed.pop(self._feeders[owner], None)
        if not lost:
            return ()
        names: defaultdict[int, list[str]] = defaultdict(list)
        refs = {}
        for part in lost:
            part.state = LEASED
            part.owner = owner
            ref = part.position.ref
            refs[ref.position] = ref
            names[ref.position].append(part.name)
        self._remade_by[owner].update(lost)
        return tuple([Remake(refs[position], tuple(sorted(names[position]))) for position in sorted(refs)])

    def make_pending(self, part: PartRecord) -> None:
        """Have a lost part produced again. Its batch comes first in line, since it is earlier than any never leased."""
        owner = part.owner
        part.state = PENDING
        part.owner = part.lease_id = NOBODY
        part.extents = ()
        if part.batch is not None:
            part.batch.pending.add(part.position.ref.position)
            self._queue(part.batch)
        elif part.name in FED_PARTS:
            self._lost_fed[self._feeders[owner]].add(part)

    def leave(self, part: PartRecord) -> None:
        """Forget a PENDING or LEASED part: it is READY, or no longer needed."""
        position = part.position.ref.position
        if part.name in FED_PARTS:
            if part.state is LEASED:
                self._remade_by[part.owner].discard(part)
            else:
                for lost in self._lost_fed.values():
                    lost.discard(part)
        elif part.state is PENDING:
            if part.batch is not None:
                part.batch.pending.discard(position)
        else:
            record = self._leases[part.lease_id]
            record.unreported.discard(position)
            if not record.unreported:
                if len(record.lease.needed) == len(record.lease.batch.positions):
                    self.on_done(record.owner, record.lease.batch, self._clock() - record.granted_s)
                self._close(record)

    def forget_batch(self, record: BatchRecord) -> None:
        """Forget a batch whose last position was consumed."""
        del self._batches[record.batch.encoder, *record.key]

    def expire(self) -> list[LeaseRecord]:
        """Take back leases that are too old, and return them."""
        limit = self._clock() - self._timeout_s
        expired = []
        for record in self._leases.values():
            if record.granted_s > limit:
                break
            expired.append(record)
        for record in expired:
            self._take_back(record)
        return expired

    def give_back(self, owner: int, lease_id: int) -> LeaseRecord | None:
        """Take back a lease, and return it; None if the owner holds it no longer."""
        record = self._leases.get(lease_id)
        if record is None or record.owner != owner:
            return None
        self._take_back(record)
        return record

    def owner_lost(self, owner: int) -> None:
        """Take back all leases of an owner, and lease nothing to it from now on."""
        self._lost_owners.add(owner)
        self._last_earlier_of.pop(owner, None)
        for lease_id in tuple(self._leases_of.pop(owner, ())):
            self._take_back(self._leases[lease_id])
        for part in self._remade_by.pop(owner, ()):
            self.make_pending(part)

    def is_lost(self, owner: int) -> bool:
        """Whether an owner is lost."""
        return owner in self._lost_owners

    def describe(self, part: PartRecord) -> str:
        """Return who produces a PENDING or LEASED part, and how long ago it was leased."""
        what = f"{part.name} of position {part.position.ref.position} ({part.nbytes} bytes) is"
        if part.state is LEASED:
            age_s = self._clock() - self._leases[part.lease_id].granted_s if part.batch is not None else 0.0
            since = f" for {age_s:.1f} s (lease {part.lease_id})" if part.batch is not None else ""
            return f"{what} leased to {self.name_of(part.owner)}{since}"
        if part.batch is None:
            return f"{what} pending: lost with its owner, and not produced again yet"
        batch, first = part.batch.batch, self.first_in_line(part.batch.batch.encoder)
        if first is not None and first.num_unfed:
            lost = f"images of {first.num_unfed} positions of batch {first.batch.index} of unit {first.batch.unit}"
            return (
                f"{what} pending in encode batch {batch.index} of unit {batch.unit}: {lost} were lost with their feeder"
            )
        head = ""
        if first is not None and first is not part.batch:
            head = f", after batch {first.batch.index} of unit {first.batch.unit}"
        return f"{what} pending in encode batch {batch.index} of unit {batch.unit}{head}: no encoder has room or asks"

    def describe_waits(self, records: Iterable[PositionRecord]) -> str:
        """Return what positions wait for: the first missing parts, each with its state, its owner, and for how long."""
        waiting = [
            part
            for record in records
            if record.missing and not record.rejected
            for part in record.parts
            if part.state is not READY
        ]
        if not waiting:
            return "nothing"
        shown = "; ".join(self.describe(part) for part in waiting[:_DESCRIBED_PARTS])
        more = f"; and {len(waiting) - _DESCRIBED_PARTS} more" if len(waiting) > _DESCRIBED_PARTS else ""
        return f"{len(waiting)} parts: {shown}{more}"

    def _take_back(self, record: LeaseRecord) -> None:
        self._close(record)
        for position in record.unreported:
            self.make_pending(record.batch.parts[position])

    def _close(self, record: LeaseRecord) -> None:
        lease_id, owner = record.lease.lease_id, record.owner
        del self._leases[lease_id]
        held = self._leases_of.get(owner)
        if held is not None:
            held.discard(lease_id)
            if not held:
                del self._leases_of[owner]
        batch = record.batch
        batch.num_leases -= 1
        if batch.held and not batch.num_leases:
            self.on_unleased(batch)

    def _queue(self, record: BatchRecord) -> None:
        if record.pending and not record.is_queued:
            record.is_queued = True
            heapq.heappush(self._lines[record.batch.encoder], record.key)


def _images_of(record: BatchRecord) -> tuple[tuple[SampleRef, ...], tuple[ImageBytes, ...]]:
    """Return the samples of a batch whose images are still kept, and where they lie."""
    refs, images = [], []
    for part in record.parts.values():
        position = part.position
        held = position.images
        if held is not None and held.state is READY and not position.is_held:
            refs.append(position.ref)
            images.append(ImageBytes(held.extents, position.image_nbytes))
    return tuple(refs), tuple(images)


def pending_nbytes(record: BatchRecord) -> int:
    """Return the bytes that a batch's PENDING parts take in a segment."""
    return sum(record.parts[position].aligned_nbytes for position in record.pending)
