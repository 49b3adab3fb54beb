"""Who makes which part: the line of encode batches, the leases that are out, the text to be made again.

The directory's half that looks at producers; PENDING and LEASED parts belong to it.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable

from flowtrain.mempool.directory_records import NOBODY, BatchRecord, PartRecord, PartState, PositionRecord
from flowtrain.types.messages import Lease
from flowtrain.types.samples import TEXT_PART, SampleRef

BatchKey = tuple[int, int]
"""(unit, batch index): the order in which batches are leased."""


class LeaseRecord:
    """One lease. open: positions not reported yet."""

    __slots__ = ("granted_s", "lease", "open", "owner", "record")

    def __init__(self, lease: Lease, owner: int, record: BatchRecord, granted_s: float) -> None:
        self.lease = lease
        self.owner = owner
        self.record = record
        self.granted_s = granted_s
        self.open: set[int] = set(lease.needed)


class LeaseBook:
    """Batches in line and leases out. aligned_nbytes gives what a part takes in a segment; clock is in seconds."""

    def __init__(self, aligned_nbytes: Callable[[int], int], timeout_s: float, clock: Callable[[], float]) -> None:
        self._aligned_nbytes = aligned_nbytes
        self._timeout_s = timeout_s
        self._clock = clock
        self._lines: defaultdict[str, list[BatchKey]] = defaultdict(list)
        self._batches: dict[tuple[str, int, int], BatchRecord] = {}
        self._leases: dict[int, LeaseRecord] = {}
        self._leases_of: defaultdict[int, set[int]] = defaultdict(set)
        self._last_id = 0
        self._lost_text: dict[int, PartRecord] = {}
        self._text_of: defaultdict[int, set[PartRecord]] = defaultdict(set)

    def add_batch(self, record: BatchRecord) -> None:
        """Put a planned batch in line, with those of its parts that are pending."""
        for position, part in record.parts.items():
            part.batch = record
            if part.state is PartState.PENDING:
                record.pending.add(position)
        batch = record.batch
        self._batches[batch.encoder, batch.unit, batch.index] = record
        self._queue(record)

    def consumed(self, position: PositionRecord) -> None:
        """A position is over; a batch is forgotten with its last one."""
        for part in position.parts.values():
            if part.batch is None:
                continue
            part.batch.unconsumed -= 1
            if not part.batch.unconsumed:
                batch = part.batch.batch
                del self._batches[batch.encoder, batch.unit, batch.index]

    def first_in_line(self, encoder: str) -> BatchRecord | None:
        """Return the earliest batch that somebody has to encode, or None."""
        line = self._lines[encoder]
        while line:
            record = self._batches.get((encoder, *line[0]))
            if record is not None:
                if record.pending:
                    return record
                record.queued = False
            heapq.heappop(line)
        return None

    def lease(self, owner: int, encoder: str, free_nbytes: int) -> Lease | None:
        """Lease the first batch in line if what is needed of it fits; see ``Directory.lease``."""
        record = self.first_in_line(encoder)
        if record is None:
            return None
        nbytes = self.pending_nbytes(record)
        if nbytes > free_nbytes:
            return None
        needed = tuple(position for position in record.batch.positions if position in record.pending)
        parts = [record.parts[position] for position in needed]
        heapq.heappop(self._lines[encoder])
        record.queued = False
        record.pending.clear()
        self._last_id += 1
        lease_id = self._last_id
        for part in parts:
            part.state = PartState.LEASED
            part.owner = owner
            part.lease_id = lease_id
        lease = Lease(lease_id, lease_id, record.batch, record.refs, needed, nbytes)
        self._leases[lease_id] = LeaseRecord(lease, owner, record, self._clock())
        self._leases_of[owner].add(lease_id)
        return lease

    def pending_nbytes(self, record: BatchRecord) -> int:
        """Return what the parts of a batch that have to be made take in a segment."""
        return sum(self._aligned_nbytes(record.parts[position].nbytes) for position in record.pending)

    def is_out(self, encoder: str) -> bool:
        """Whether somebody holds a lease of an encoder's batches."""
        return any(record.lease.batch.encoder == encoder for record in self._leases.values())

    def lease_lost_text(self, owner: int) -> tuple[SampleRef, ...]:
        """Lease all lost text parts to an owner, in order of position."""
        parts = [self._lost_text[position] for position in sorted(self._lost_text)]
        self._lost_text.clear()
        for part in parts:
            part.state = PartState.LEASED
            part.owner = owner
        self._text_of[owner].update(parts)
        return tuple(part.position.ref for part in parts)

    def make_pending(self, part: PartRecord) -> None:
        """Have a lost part made again, first in line since its batch is earlier than any that was never leased."""
        part.state = PartState.PENDING
        part.owner = part.lease_id = NOBODY
        part.extents = ()
        if part.name == TEXT_PART:
            self._lost_text[part.position.ref.position] = part
        elif part.batch is not None:
            part.batch.pending.add(part.position.ref.position)
            self._queue(part.batch)

    def leave(self, part: PartRecord) -> None:
        """A PENDING or LEASED part is READY, or not wanted any more."""
        position = part.position.ref.position
        if part.name == TEXT_PART:
            self._lost_text.pop(position, None)
            self._text_of[part.owner].discard(part)
        elif part.state is PartState.PENDING:
            if part.batch is not None:
                part.batch.pending.discard(position)
        else:
            record = self._leases[part.lease_id]
            record.open.discard(position)
            if not record.open:
                self._close(record)

    def expire(self) -> list[tuple[Lease, BatchRecord]]:
        """Take back the leases that are too old, and return them with what they were of."""
        limit = self._clock() - self._timeout_s
        expired = []
        for record in self._leases.values():  # in the order in which they were granted, so the oldest come first
            if record.granted_s > limit:
                break
            expired.append(record)
        for record in expired:
            self._take_back(record)
        return [(record.lease, record.record) for record in expired]

    def owner_lost(self, owner: int) -> None:
        """Take back whatever an owner had leased."""
        for lease_id in tuple(self._leases_of.pop(owner, ())):
            self._take_back(self._leases[lease_id])
        for part in self._text_of.pop(owner, ()):
            self.make_pending(part)

    def age_s(self, lease_id: int) -> float:
        """Return how long ago an open lease was granted."""
        return self._clock() - self._leases[lease_id].granted_s

    def _take_back(self, record: LeaseRecord) -> None:
        self._close(record)
        for position in record.open:
            self.make_pending(record.record.parts[position])

    def _close(self, record: LeaseRecord) -> None:
        del self._leases[record.lease.lease_id]
        self._leases_of[record.owner].discard(record.lease.lease_id)
        if not self._leases_of[record.owner]:
            del self._leases_of[record.owner]

    def _queue(self, record: BatchRecord) -> None:
        if record.pending and not record.queued:
            record.queued = True
            heapq.heappush(self._lines[record.batch.encoder], record.key)
