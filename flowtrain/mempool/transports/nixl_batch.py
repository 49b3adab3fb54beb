"""One batch of network reads: the runs to read from each owner, and where they land."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flowtrain.mempool.page_table import Mapping, SegmentKey
from flowtrain.mempool.tiers.virtual_memory import PAGE_NBYTES
from flowtrain.mempool.transports.landing import LandingBuffer
from flowtrain.mempool.transports.nixl_agent import Descriptor
from flowtrain.mempool.transports.nixl_export import STAMP_NBYTES, NetworkExport
from flowtrain.types.memory import SegmentExport

LARGEST_GAP_NBYTES = PAGE_NBYTES
"""Extents that lie at most this far apart are read as one run: reading the gap takes less than one more request."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A connected owner. wire: the bytes that ``export`` was read from, to notice when they change."""

    name: str
    export: NetworkExport
    wire: bytes


Run = tuple[int, int, int]
"""Bytes of a segment that are read together: (offset, nbytes, start in the landing buffer)."""


@dataclass(slots=True)
class Share:
    """One owner's share of a batch: the runs to read, ascending, and where its stamp lands."""

    segment: SegmentExport
    runs: list[Run]
    stamp_start: int
    peer: Peer | None = None
    handle: int | None = None


@dataclass(slots=True, eq=False)
class Batch:
    """A batch that is being read into ``buffer``, or has arrived."""

    buffer: LandingBuffer
    shares: dict[SegmentKey, Share] = field(default_factory=dict)
    has_arrived: bool = False


def lay_out(sources: Sequence[Mapping]) -> tuple[dict[SegmentKey, Share], list[int], int]:
    """Plan where everything lands. Returns shares by owner, each source's start in the buffer, the buffer's size.

    Sources that overlap or lie close are read as one run.
    """
    by_owner: dict[SegmentKey, list[int]] = {}
    newest: dict[SegmentKey, SegmentExport] = {}
    seen: SegmentExport | None = None
    indices: list[int] = []
    for index, (export, _, _) in enumerate(sources):
        if export is not seen:
            seen, key = export, (export.tier, export.process_index)
            indices = by_owner.setdefault(key, [])
            # The newest export covers what an older one covers.
            if key not in newest or export.bound_nbytes > newest[key].bound_nbytes:
                newest[key] = export
        indices.append(index)
    shares, starts, end = {}, [0] * len(sources), 0
    offsets = [source[1] for source in sources]
    for key, indices in by_owner.items():
        share = shares[key] = Share(newest[key], [], end)
        indices.sort(key=offsets.__getitem__)
        end = _lay_out_owner(sources, indices, share.runs, starts, end + STAMP_NBYTES)
    return shares, starts, end


def _lay_out_owner(
    sources: Sequence[Mapping], ascending: Sequence[int], runs: list[Run], starts: list[int], start: int
) -> int:
    """Fill in the runs and starts of one owner's sources, from ``start`` on; returns where they end in the buffer."""
    first = last = sources[ascending[0]].offset  # of the current run
    # At the same offset in a page as in the segment, so that every extent keeps its alignment.
    start += (first - start) % PAGE_NBYTES
    for index in ascending:
        _, offset, nbytes = sources[index]
        if offset - last > LARGEST_GAP_NBYTES:
            runs.append((first, last - first, start))
            start += last - first
            start += (offset - start) % PAGE_NBYTES
            first = last = offset
        starts[index] = start + offset - first
        if offset + nbytes > last:
            last = offset + nbytes
    runs.append((first, last - first, start))
    return start + last - first


def requests(share: Share, export: NetworkExport, buffer_address: int) -> tuple[list[Descriptor], list[Descriptor]]:
    """Return the descriptors to read, stamp first: landing places, and places in the owner. Raises AddressError."""
    here = [(buffer_address + share.stamp_start, STAMP_NBYTES, 0)]
    there = [(export.stamp_address, STAMP_NBYTES, 0)]
    piece = export.pieces[0]
    offset, nbytes, _ = share.runs[-1]
    if offset + nbytes <= piece.nbytes:  # the usual case: a segment that has not grown
        base = piece.address
        here += [(buffer_address + start, nbytes, 0) for _, nbytes, start in share.runs]
        there += [(base + offset, nbytes, 0) for offset, nbytes, _ in share.runs]
        return here, there
    for offset, nbytes, start in share.runs:
        landed = buffer_address + start
        for address, length in export.locate(offset, nbytes):
            here.append((landed, length, 0))
            there.append((address, length, 0))
            landed += length
    return here, there


def key_of(export: SegmentExport) -> SegmentKey:
    """Return the key of an export's segment."""
    return export.tier, export.process_index
