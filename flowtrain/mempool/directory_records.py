"""What the directory remembers of a part, a position, a microbatch, a batch and a lease."""

from __future__ import annotations

import enum

from flowtrain.errors import PoolError
from flowtrain.types.events import LedgerRow
from flowtrain.types.memory import Extent, Tier
from flowtrain.types.plan import EncodeBatch, Unit
from flowtrain.types.samples import SampleRef, SizedSample

NOBODY = -1


class PartState(enum.Enum):
    """A part's life: PENDING -> LEASED -> READY -> RELEASED; a lost owner or lease takes it back to PENDING."""

    PENDING = "pending"
    LEASED = "leased"
    READY = "ready"
    RELEASED = "released"


class PartRecord:
    """One part of a position. lease_id: of the lease that it is under, which is also its epoch."""

    __slots__ = ("batch", "extents", "lease_id", "name", "nbytes", "owner", "position", "state", "tier")

    def __init__(self, position: PositionRecord, name: str, nbytes: int) -> None:
        self.position = position
        self.name = name
        self.nbytes = nbytes
        self.state = PartState.PENDING
        self.owner = NOBODY
        self.lease_id = NOBODY
        self.extents: tuple[Extent, ...] = ()
        self.tier = Tier.DRAM
        self.batch: BatchRecord | None = None


class PositionRecord:
    """One position. missing: parts that are not READY. produced: whether it was complete once."""

    __slots__ = ("microbatch", "missing", "parts", "produced", "ref", "rejected")

    def __init__(self, ref: SampleRef) -> None:
        self.ref = ref
        self.parts: dict[str, PartRecord] = {}
        self.missing = 0
        self.microbatch: MicrobatchRecord | None = None
        self.produced = False
        self.rejected = False

    @classmethod
    def of(cls, sample: SizedSample) -> PositionRecord:
        """Start the record of a sized sample."""
        record = cls(sample.ref)
        for size in sample.parts:
            record.parts[size.name] = PartRecord(record, size.name, size.nbytes)
        record.missing = len(record.parts)
        return record

    def part(self, name: str) -> PartRecord:
        """Return a part by its name; PoolError for one that the position does not have."""
        part = self.parts.get(name)
        if part is None:
            raise PoolError(f"position {self.ref.position} has no part {name!r}; it has {', '.join(self.parts)}")
        return part

    @property
    def is_located(self) -> bool:
        """Whether a rank was told where its microbatch lies."""
        return self.microbatch is not None and self.microbatch.located

    @property
    def is_handed_out(self) -> bool:
        """Whether a rank was told where all of it lies."""
        microbatch = self.microbatch
        return microbatch is not None and microbatch.located and (microbatch.released or not self.missing)

    def ledger_row(self, step: int) -> LedgerRow:
        """Return how it ended, at the end of its unit."""
        ref, microbatch = self.ref, self.microbatch
        dp_rank, slot = (microbatch.dp_rank, microbatch.slot) if microbatch is not None else (NOBODY, NOBODY)
        state = "rejected" if self.rejected else "consumed"
        return LedgerRow(ref.position, ref.source, ref.row, ref.epoch, step, dp_rank, slot, state)


class MicrobatchRecord:
    """One planned microbatch. missing: positions neither complete nor rejected. located: a rank knows where it lies."""

    __slots__ = ("dp_rank", "located", "missing", "positions", "released", "slot", "unit")

    def __init__(self, unit: UnitRecord, slot: int, dp_rank: int) -> None:
        self.unit = unit
        self.slot = slot
        self.dp_rank = dp_rank
        self.positions: list[PositionRecord] = []
        self.missing = 0
        self.located = False
        self.released = False

    def one_less_missing(self) -> None:
        """A position of it is complete, or rejected."""
        self.missing -= 1
        if not self.missing and not self.released:
            self.unit.ready[self.dp_rank].add(self.slot)

    def one_more_missing(self) -> None:
        """A complete position of it lost a part."""
        self.missing += 1
        self.unit.ready[self.dp_rank].discard(self.slot)


class UnitRecord:
    """One planned unit. ready: per DP rank, the slots that may run. unreleased: microbatches still to be released."""

    __slots__ = ("microbatches", "ready", "unit", "unreleased")

    def __init__(self, unit: Unit, dp_size: int) -> None:
        self.unit = unit
        self.microbatches: dict[tuple[int, int], MicrobatchRecord] = {}
        self.ready: list[set[int]] = [set() for _ in range(dp_size)]
        self.unreleased = 0


class BatchRecord:
    """One encode batch.

    parts: by position. pending: positions to be leased. unconsumed: how many no unit has consumed. queued: whether it
    stands in line.
    """

    __slots__ = ("batch", "parts", "pending", "queued", "refs", "unconsumed")

    def __init__(self, batch: EncodeBatch, parts: dict[int, PartRecord]) -> None:
        self.batch = batch
        self.parts = parts
        self.refs = tuple(part.position.ref for part in parts.values())
        self.pending: set[int] = set()
        self.unconsumed = len(parts)
        self.queued = False

    @property
    def key(self) -> tuple[int, int]:
        """(unit, batch index): the order in which batches are leased."""
        return self.batch.unit, self.batch.index
