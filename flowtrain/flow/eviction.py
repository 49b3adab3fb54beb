"""Eviction: after memory was lost for good, later parts make room for the batch that is needed first.

As long as every lost process comes back with an empty segment, leases in order never need it.
"""

from __future__ import annotations

from collections import defaultdict

from flowtrain.flow.leases import pending_nbytes
from flowtrain.flow.parts import Parts
from flowtrain.flow.records import DRAM, BatchKey, PartRecord

_UNPLANNED = 1 << 62


def may_evict(parts: Parts, owner: int, encoder: str) -> bool:
    """Whether ``make_room`` may evict: memory was lost for good, a batch waits for nothing but room, none is leased."""
    if not parts.has_lost_memory or parts.leases.is_lost(owner) or parts.leases.is_granted(encoder):
        return False
    first = parts.leases.first_in_line(encoder)
    return first is not None and not first.num_unfed


def make_room(parts: Parts, owner: int, encoder: str, free_nbytes: int, kept_unit: int | None = None) -> bool:
    """Evict parts from an owner's DRAM segment for the first batch in line, if ``free_nbytes`` are too few.

    Does nothing unless ``may_evict``: after a loss for good, the other segments can be full of later positions.

    Evicts whole batches, since a batch is leased as one again: the parts that are needed last go first. Only parts of
    later batches go, and none whose place a rank knows. They are produced again in line, and their extents may be
    freed.

    kept_unit: no part that this unit runs is evicted.

    Returns whether parts were evicted. If all such parts together would not be enough, none is evicted.
    """
    blocked = parts.leases.first_in_line(encoder) if may_evict(parts, owner, encoder) else None
    if blocked is None:
        return False
    lacking_nbytes = pending_nbytes(blocked) - free_nbytes
    batches: defaultdict[tuple[int, BatchKey], list[PartRecord]] = defaultdict(list)
    for part in parts.holdings.ready_parts(owner):
        batch, position = part.batch, part.position
        if part.tier is not DRAM or batch is None or batch.key <= blocked.key or position.is_located:
            continue
        used_in = position.microbatch.unit if position.microbatch is not None else _UNPLANNED
        if used_in == kept_unit:
            continue
        batches[used_in, batch.key].append(part)
    chosen: list[PartRecord] = []
    for key in sorted(batches, reverse=True):
        if lacking_nbytes <= 0:
            break
        chosen += batches[key]
        lacking_nbytes -= sum(part.aligned_nbytes for part in batches[key])
    if lacking_nbytes > 0:
        return False
    for part in chosen:
        parts.evict(part)
    return bool(chosen)
