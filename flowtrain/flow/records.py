"""The flow's records: part, position, microbatch, encode batch, lease."""

from __future__ import annotations

import enum

from flowtrain.errors import PoolError
from flowtrain.types.events import LedgerRow
from flowtrain.types.memory import Extent, Tier
from flowtrain.types.messages import Lease
from flowtrain.types.plan import EncodeBatch
from flowtrain.types.samples import IMAGES_PART, TEXT_PART, SampleRef, SizedSample

NOBODY = -1

BatchKey = tuple[int, int]
"""(unit, batch index): the order in which batches are leased."""


class PartState(enum.Enum):
    """States of a part: PENDING -> LEASED -> READY -> RELEASED. A lost owner or lease takes it back to PENDING."""

    PENDING = "pending"
    LEASED = "leased"
    READY = "ready"
    RELEASED = "released"


# Looking up a module's name takes a tenth of the time of an enum member, and every part is read several times.
PENDING, LEASED, READY, RELEASED = PartState
DRAM = Tier.DRAM


class PartRecord:
    """One part of a position.

    nbytes: size of its array.
    aligned_nbytes: bytes that the array takes in a segment.
    owner: process index; NOBODY while the part is PENDING.
    lease_id: its lease, which is also its epoch.
    extents: where it lies while READY.
    batch: its encode batch; None for what a feeder puts.
    """

    __slots__ = (
        "aligned_nbytes",
        "batch",
        "extents",
        "lease_id",
        "name",
        "nbytes",
        "owner",
        "position",
        "state",
        "tier",
    )

    def __init__(self, position: PositionRecord, name: str, nbytes: int, aligned_nbytes: int) -> None:
        self.position = position
        self.name = name
        self.nbytes = nbytes
        self.aligned_nbytes = aligned_nbytes
        self.state = PENDING
        self.owner = NOBODY
        self.lease_id = NOBODY
        self.extents: tuple[Extent, ...] = ()
        self.tier = DRAM
        self.batch: BatchRecord | None = None


class PositionRecord:
    """One position.

    parts: what the backbone reads: text and features, or in ``mode: monolithic`` text and encoded images.
    images: its encoded images, if encoders read them; None without images.
    image_nbytes: bytes of each image.
    is_held: its images are no longer needed; a lease that refers to them keeps them.
    missing: count of ``parts`` that are not READY.
    produced: all parts were READY at one time.
    """

    __slots__ = ("image_nbytes", "images", "is_held", "microbatch", "missing", "parts", "produced", "ref", "rejected")

    def __init__(self, ref: SampleRef) -> None:
        self.ref = ref
        self.parts: tuple[PartRecord, ...] = ()
        self.images: PartRecord | None = None
        self.image_nbytes: tuple[int, ...] = ()
        self.is_held = False
        self.missing = 0
        self.microbatch: MicrobatchRecord | None = None
        self.produced = False
        self.rejected = False

    @classmethod
    def of(cls, sample: SizedSample, alignment: int, ranks_read_images: bool = False) -> PositionRecord:
        """Start the record of a sized sample. ranks_read_images: its images are a part that the backbone reads."""
        record = cls(sample.ref)
        parts = [
            PartRecord(record, size.name, size.nbytes, -(-size.nbytes // alignment) * alignment)
            for size in sample.parts
            if not ranks_read_images or size.name == TEXT_PART
        ]
        if sample.image_nbytes:
            nbytes = sum(sample.image_nbytes)
            record.image_nbytes = sample.image_nbytes
            images = PartRecord(record, IMAGES_PART, nbytes, -(-nbytes // alignment) * alignment)
            if ranks_read_images:
                parts.append(images)
            else:
                record.images = images
        record.parts = tuple(parts)
        record.missing = len(parts)
        return record

    def part(self, name: str) -> PartRecord:
        """Return a part by its name. Raises PoolError if the position has no such part."""
        for part in self.parts:  # two, mostly
            if part.name == name:
                return part
        if name == IMAGES_PART and self.images is not None:
            return self.images
        names = ", ".join(part.name for part in self.parts)
        raise PoolError(f"position {self.ref.position} has no part {name!r}; it has {names}")

    @property
    def is_located(self) -> bool:
        """Whether a replica knows where its microbatch lies."""
        return self.microbatch is not None and self.microbatch.is_located

    @property
    def is_handed_out(self) -> bool:
        """Whether a replica knows where all its parts lie."""
        microbatch = self.microbatch
        if microbatch is None or not microbatch.is_located:
            return False
        return microbatch.is_released or not self.missing

    def ledger_row(self, step: int) -> LedgerRow:
        """Return its ledger row, at the end of its unit."""
        ref, microbatch = self.ref, self.microbatch
        dp_rank, slot = (microbatch.dp_rank, microbatch.slot) if microbatch is not None else (NOBODY, NOBODY)
        state = "rejected" if self.rejected else "consumed"
        return LedgerRow(ref.position, ref.source, ref.row, ref.epoch, step, dp_rank, slot, state)


class MicrobatchRecord:
    """One planned microbatch of a data parallel replica.

    unit: index of its unit.
    ready_slots: slots of this unit and replica that may run; the microbatches share the set.
    missing: count of positions that are neither complete nor rejected.
    is_located: the replica knows where it lies.
    is_released: the replica has read it.
    """

    __slots__ = (
        "dp_rank",
        "is_located",
        "is_released",
        "missing",
        "positions",
        "ready_slots",
        "slot",
        "unit",
    )

    def __init__(self, unit: int, slot: int, dp_rank: int, ready_slots: set[int]) -> None:
        self.unit = unit
        self.slot = slot
        self.dp_rank = dp_rank
        self.ready_slots = ready_slots
        self.positions: list[PositionRecord] = []
        self.missing = 0
        self.is_located = False
        self.is_released = False

    def one_less_missing(self) -> None:
        """Note that one of its positions is complete, or rejected."""
        self.missing -= 1
        if not self.missing and not self.is_released:
            self.ready_slots.add(self.slot)

    def one_more_missing(self) -> None:
        """Note that one of its complete positions lost a part."""
        self.missing += 1
        self.ready_slots.discard(self.slot)


class BatchRecord:
    """One encode batch.

    key: place in the order of leases.
    parts: its parts by position.
    pending: positions whose parts are PENDING.
    num_unread: count of parts that are not RELEASED.
    num_unfed: count of positions whose images are lost, and not produced again yet.
    num_leases: leases of the batch; more than one only where parts were lost at different times.
    held: positions whose images are kept for these leases alone.
    num_unconsumed: count of positions that no unit has consumed.
    is_queued: the batch is in line.
    """

    __slots__ = (
        "batch",
        "held",
        "is_queued",
        "key",
        "num_leases",
        "num_unconsumed",
        "num_unfed",
        "num_unread",
        "parts",
        "pending",
    )

    def __init__(self, batch: EncodeBatch, parts: dict[int, PartRecord]) -> None:
        self.batch = batch
        self.key: BatchKey = (batch.unit, batch.index)
        self.parts = parts
        self.pending: set[int] = set()
        self.num_unread = 0
        self.num_unfed = 0
        self.num_leases = 0
        self.held: list[PositionRecord] = []
        self.num_unconsumed = len(parts)
        self.is_queued = False


class LeaseRecord:
    """One lease. unreported: positions that its owner has not reported. granted_s: by the flow's clock."""

    __slots__ = ("batch", "granted_s", "lease", "owner", "unreported")

    def __init__(self, lease: Lease, owner: int, batch: BatchRecord, granted_s: float) -> None:
        self.lease = lease
        self.owner = owner
        self.batch = batch
        self.granted_s = granted_s
        self.unreported: set[int] = set(lease.needed)
