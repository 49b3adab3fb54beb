"""One batch of network reads: what is asked of each owner, and where it lands."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flowtrain.mempool.page_table import Mapping, SegmentKey
from flowtrain.mempool.tiers.virtual_memory import PAGE_NBYTES
from flowtrain.mempool.transports.landing import LandingBuffer
from flowtrain.mempool.transports.nixl_export import STAMP_NBYTES, NetworkExport, Run, join_runs
from flowtrain.types import SegmentExport

LARGEST_GAP_NBYTES = PAGE_NBYTES
"""Extents that lie at most this far apart are read as one run: the bytes between cost less than one more request."""


@dataclass(frozen=True, slots=True)
class Peer:
    """An owner as this process connected to it. wire: the export that this was read from, to see when it changes."""

    name: str
    export: NetworkExport
    wire: bytes


@dataclass(slots=True)
class Share:
    """One owner's share of a batch: the runs to read, where each lands in the buffer, and where its stamp does."""

    segment: SegmentExport
    runs: list[Run]
    starts: list[int]
    stamp_start: int
    peer: Peer | None = None
    handle: Any = None

    def start_of(self, offset: int) -> int:
        """Return where a byte of the segment lands."""
        index = bisect_right(self.runs, offset, key=lambda run: run.offset) - 1
        return self.starts[index] + offset - self.runs[index].offset


@dataclass(slots=True, eq=False)
class Batch:
    """A batch on its way into ``buffer``."""

    buffer: LandingBuffer
    shares: dict[SegmentKey, Share] = field(default_factory=dict)


def lay_out(sources: Sequence[Mapping]) -> tuple[dict[SegmentKey, Share], int]:
    """Plan where everything lands: by owner, in runs joined over small gaps; returns also the buffer's size."""
    by_owner: dict[SegmentKey, list[Mapping]] = {}
    for source in sources:
        by_owner.setdefault(key_of(source.export), []).append(source)
    shares, end = {}, 0
    for key, owned in by_owner.items():
        # The newest export covers what an older one covers.
        segment = max((source.export for source in owned), key=lambda export: export.bound_nbytes)
        runs = join_runs([Run(source.offset, source.nbytes) for source in owned], LARGEST_GAP_NBYTES)
        stamp_start, end = end, end + STAMP_NBYTES
        starts = []
        for run in runs:
            # As far into a page as it is in the segment, so that every extent keeps its alignment.
            end += (run.offset - end) % PAGE_NBYTES
            starts.append(end)
            end += run.nbytes
        shares[key] = Share(segment, runs, starts, stamp_start)
    return shares, end


def key_of(export: SegmentExport) -> SegmentKey:
    """Return what names an export's segment."""
    return export.tier, export.process_index
