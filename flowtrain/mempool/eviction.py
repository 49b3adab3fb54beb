"""Which READY parts make room for an earlier batch, when memory was lost for good and the rest is full of later ones.

As long as every lost process comes back with an empty segment, leases in order never need this: what lies in the
segments is then earlier than what waits for room.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from flowtrain.mempool.directory_records import BatchRecord, PartRecord
from flowtrain.types.memory import Tier

_UNPLANNED = 1 << 62


def farthest_parts(
    parts: Iterable[PartRecord], blocked: BatchRecord, lacking_nbytes: int, aligned: Callable[[int], int]
) -> list[PartRecord]:
    """Choose parts to evict from one owner's DRAM segment, the farthest from being used first.

    parts: READY parts of the owner; those in HBM stay, where no lease is promised room. blocked: the batch that needs
    ``lacking_nbytes`` more; only parts of later batches go, and none that a rank was told to read. Those of a batch go
    together, since it is leased as one again. aligned: bytes that a part takes. Returns nothing where all of them would
    not be enough.
    """
    batches: defaultdict[tuple[int, tuple[int, int]], list[PartRecord]] = defaultdict(list)
    for part in parts:
        if part.tier is not Tier.DRAM or part.batch is None or part.batch.key <= blocked.key:
            continue
        if part.position.is_located:
            continue
        microbatch = part.position.microbatch
        used_in = microbatch.unit.unit.index if microbatch is not None else _UNPLANNED
        batches[used_in, part.batch.key].append(part)
    chosen: list[PartRecord] = []
    for key in sorted(batches, reverse=True):
        if lacking_nbytes <= 0:
            break
        chosen += batches[key]
        lacking_nbytes -= sum(aligned(part.nbytes) for part in batches[key])
    return chosen if lacking_nbytes <= 0 else []
