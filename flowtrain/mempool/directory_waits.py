"""Says what positions wait for: each part, its state, who has it and for how long."""

from __future__ import annotations

from collections.abc import Iterable

from flowtrain.mempool.directory_records import MicrobatchRecord, PartRecord, PartState, PositionRecord
from flowtrain.mempool.lease_book import LeaseBook

_DESCRIBED_PARTS = 8


def waiting_parts(positions: Iterable[PositionRecord]) -> list[PartRecord]:
    """Return the parts that somebody still has to make."""
    return [
        part
        for position in positions
        if position.missing and not position.rejected
        for part in position.parts.values()
        if part.state is not PartState.READY
    ]


def describe_microbatch(record: MicrobatchRecord | None, leases: LeaseBook) -> str:
    """Say what a microbatch waits for (None: one of no plan), as the end of a sentence."""
    if record is None:
        return "is not planned"
    waiting = waiting_parts(record.positions)
    if record.released or not waiting:
        return f"is {'released' if record.released else 'ready'}"
    return f"waits for {describe_parts(waiting, leases)}"


def describe_parts(waiting: list[PartRecord], leases: LeaseBook) -> str:
    """Describe PENDING and LEASED parts, the first ones each; leases: the book that has them."""
    if not waiting:
        return "nothing"
    shown = "; ".join(_describe(part, leases) for part in waiting[:_DESCRIBED_PARTS])
    more = f"; and {len(waiting) - _DESCRIBED_PARTS} more" if len(waiting) > _DESCRIBED_PARTS else ""
    return f"{len(waiting)} parts: {shown}{more}"


def _describe(part: PartRecord, leases: LeaseBook) -> str:
    what = f"{part.name} of position {part.position.ref.position} ({part.nbytes} bytes) is"
    if part.state is PartState.LEASED:
        age = f" for {leases.age_s(part.lease_id):.1f} s (lease {part.lease_id})" if part.batch else ""
        return f"{what} leased to process {part.owner}{age}"
    if part.batch is None:
        return f"{what} pending: lost with its owner and to be made again"
    batch = part.batch.batch
    first = leases.first_in_line(batch.encoder)
    head = f", behind batch {first.batch.index} of unit {first.batch.unit}" if first not in (None, part.batch) else ""
    return f"{what} pending in encode batch {batch.index} of unit {batch.unit}{head}: no encoder has room or asks"
