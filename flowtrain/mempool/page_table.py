"""A process's table of the segments of its peers: it translates addresses without a message (FlowTrain 3.2)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from flowtrain.errors import AddressError
from flowtrain.mempool.gva import AddressSpace
from flowtrain.types.memory import Extent, SegmentExport, Tier

SegmentKey = tuple[Tier, int]
"""(tier, process index). It names a segment for the whole run, since an index is never used again."""


class Mapping(NamedTuple):
    """A resolved extent: ``nbytes`` bytes from ``offset`` in the segment that ``export`` describes."""

    export: SegmentExport
    offset: int
    nbytes: int


class PageTable:
    """Maps (tier, process index) to the export of that process.

    A restarted process takes a new index. So an entry can grow or go, but it never changes to another process. The
    table remembers the process of an index after the entry is gone, so that an old address is never read from a new
    process.
    """

    def __init__(self, space: AddressSpace) -> None:
        self._space = space
        self._exports: dict[SegmentKey, SegmentExport] = {}
        self._owners: dict[SegmentKey, tuple[str, int]] = {}

    def update(self, exports: Iterable[SegmentExport]) -> tuple[SegmentKey, ...]:
        """Replace the table by the exports of all living processes. Returns the segments that are gone.

        Raises AddressError for an index outside the space, for more bytes than a segment has, and for an index that is
        used again.
        """
        fresh: dict[SegmentKey, SegmentExport] = {}
        for export in exports:
            self._check(export)
            fresh[export.tier, export.process_index] = export
        self._owners.update((key, (export.node_id, export.pid)) for key, export in fresh.items())
        gone = tuple(key for key in self._exports if key not in fresh)
        self._exports = fresh
        return gone

    def lookup(self, extent: Extent) -> Mapping | None:
        """Resolve an extent. None: its process or its bytes are not in the table, which may be out of date.

        Raises AddressError for an extent that is invalid in every table.
        """
        place = self._space.place(extent)
        export = self._exports.get((place.tier, place.process_index))
        if export is None or place.offset + extent.nbytes > export.bound_nbytes:
            return None
        return Mapping(export, place.offset, extent.nbytes)

    def export_of(self, tier: Tier, process_index: int) -> SegmentExport | None:
        """Return the export of a process in a tier, or None."""
        return self._exports.get((tier, process_index))

    def _check(self, export: SegmentExport) -> None:
        self._space.gva(export.tier, export.process_index, 0)
        if export.bound_nbytes > self._space.segment_nbytes:
            raise AddressError(
                f"process {export.process_index} exports {export.bound_nbytes} bytes of {export.tier}; a segment of "
                f"the address space has {self._space.segment_nbytes} (pool.max_segment_nbytes)"
            )
        key = (export.tier, export.process_index)
        node_id, pid = self._owners.get(key, (export.node_id, export.pid))
        known_nbytes = self._exports[key].bound_nbytes if key in self._exports else 0
        if (node_id, pid) != (export.node_id, export.pid) or export.bound_nbytes < known_nbytes:
            raise AddressError(
                f"process index {export.process_index} was used again: node {node_id} pid {pid} with {known_nbytes} "
                f"bytes, now node {export.node_id} pid {export.pid} with {export.bound_nbytes}; a restarted process "
                "must take a new index"
            )
