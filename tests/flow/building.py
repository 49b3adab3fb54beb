"""Small plans for the tests of parts and microbatches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from flowtrain.flow.microbatches import Microbatches
from flowtrain.flow.parts import Parts
from flowtrain.mempool.gva import AddressSpace
from flowtrain.types.events import LedgerRow
from flowtrain.types.memory import Extent, Tier
from flowtrain.types.messages import MicrobatchLocation, PartReady
from flowtrain.types.plan import EncodeBatch, Microbatch, PlannedSample, StepPlan, Unit, UnitKind
from flowtrain.types.samples import IMAGES_PART, TEXT_PART, PartSize, Rejection, RejectReason, SampleRef, SizedSample

ALIGNMENT = 64
VISION = "vision"
IMAGES = (30, 20)
"""Bytes of the encoded images of each sample that has some."""
Clock = Callable[[], float]
Put = Callable[[int], tuple[Extent, ...]]
"""Puts a part of so many bytes."""


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def ref(position: int) -> SampleRef:
    return SampleRef(position, source=1, row=position * 10, epoch=2)


def sized(position: int, vision_nbytes: int = 0, text_nbytes: int = 80) -> SizedSample:
    parts = [PartSize(TEXT_PART, 1, 0, text_nbytes // 8, text_nbytes)]
    if vision_nbytes:
        parts.append(PartSize(VISION, 1, 4, 4, vision_nbytes))
    images = IMAGES if vision_nbytes else ()
    return SizedSample(ref(position), 10, 4 if vision_nbytes else 0, 5, tuple(parts), images)


def vision_nbytes(sample: SizedSample) -> int:
    return sum(part.nbytes for part in sample.parts if part.name == VISION)


def rejection(position: int) -> Rejection:
    return Rejection(ref(position), RejectReason.CORRUPT_IMAGE, "bytes are no image")


def plan(
    samples: Sequence[SizedSample],
    *,
    index: int = 0,
    first: int = 0,
    count: int | None = None,
    dp_size: int = 1,
    per_microbatch: int = 1,
    per_batch: int = 1,
    kind: UnitKind = UnitKind.TRAIN,
) -> StepPlan:
    """Plan samples in order, with encode batches of ``per_batch`` samples with images."""
    chunks = [tuple(samples[i : i + per_microbatch]) for i in range(0, len(samples), per_microbatch)]
    while not chunks or len(chunks) % dp_size:
        chunks.append(())
    slots = tuple(
        tuple(_microbatch(slot, rank, chunks[slot * dp_size + rank]) for rank in range(dp_size))
        for slot in range(len(chunks) // dp_size)
    )
    images = [sample for sample in samples if vision_nbytes(sample)]
    batches = tuple(
        EncodeBatch(
            index,
            number,
            VISION,
            tuple(sample.position for sample in images[start : start + per_batch]),
            4 * len(images[start : start + per_batch]),
            sum(aligned(vision_nbytes(sample)) for sample in images[start : start + per_batch]),
        )
        for number, start in enumerate(range(0, len(images), per_batch))
    )
    unit = Unit(index, kind, index + 1, first, len(samples) if count is None else count)
    return StepPlan.of_slots(unit, 64, slots, batches)


def _microbatch(slot: int, rank: int, samples: Sequence[SizedSample]) -> Microbatch:
    planned = tuple(PlannedSample(s.position, s.num_tokens, s.num_vision_tokens, s.num_target_tokens) for s in samples)
    return Microbatch(slot, rank, planned, 1.0)


class Tables:
    """The parts table and the microbatches over it, as in a flow; one rank per replica."""

    def __init__(
        self,
        space: AddressSpace,
        lease_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        keeps_batches: bool = True,
    ) -> None:
        self.parts = Parts(
            space, alignment=ALIGNMENT, lease_timeout_s=lease_timeout_s, keeps_batches=keeps_batches, clock=clock
        )
        self.microbatches = Microbatches(self.parts)

    def feed(self, sample: SizedSample, owner: int, put: Put) -> dict[str, tuple[Extent, ...]]:
        """Take in a sample, and return where its parts lie."""
        where = {TEXT_PART: put(sample.parts[0].nbytes)}
        if sample.image_nbytes:
            where[IMAGES_PART] = put(sum(sample.image_nbytes))
        text, *images = [PartReady(sample.position, part, 0, extents) for part, extents in where.items()]
        self.parts.add_sized([sample], owner, [text], images)
        return where

    def ready_slots(self, unit: int, rank: int) -> tuple[int, ...]:
        return tuple(sorted(self.microbatches._units[unit].ready_slots[rank]))

    def is_ready(self, unit: int, slot: int, rank: int) -> bool:
        return slot in self.ready_slots(unit, rank)

    def locate(self, unit: int, slot: int, rank: int) -> MicrobatchLocation | None:
        return next(iter(self.microbatches.locate(unit, slot, rank)), None)

    def release(self, unit: int, slot: int, rank: int) -> None:
        self.microbatches.release(unit, (slot,), rank)

    def consume(self, unit: int) -> tuple[LedgerRow, ...]:
        return self.parts.consume(self.microbatches.end(unit))

    def describe_positions(self, positions: Iterable[int]) -> str:
        return self.parts.leases.describe_waits(self.parts[position] for position in positions)

    def occupancy(self) -> dict[Tier, int]:
        """Bytes of READY parts in each tier."""
        found = dict.fromkeys(Tier, 0)
        for ready in self.parts.holdings._ready_of.values():
            for part in ready:
                found[part.tier] += part.nbytes
        assert found[Tier.HBM] == self.parts.holdings.hbm_nbytes
        return found
