"""The client of the unified memory pool: a process puts into its own segment and reads everybody's by address."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Literal

import numpy as np

from flowtrain.errors import AddressError, ConfigError, OwnerLostError, PoolError
from flowtrain.mempool.arena import Arena, Hold, Run
from flowtrain.mempool.gva import AddressSpace
from flowtrain.mempool.page_table import Mapping, PageTable
from flowtrain.mempool.tiers.dram import DramRegion, DramSegment
from flowtrain.mempool.transports.base import Distance, Transport, slices
from flowtrain.mempool.transports.local import LocalTransport
from flowtrain.mempool.transports.nixl import NixlTransport
from flowtrain.mempool.transports.registry import TransportRegistry
from flowtrain.mempool.transports.shared_memory import SharedMemoryTransport
from flowtrain.mempool.watermarks import TierPolicy
from flowtrain.types import Extent, PoolStats, SegmentExport, Tier

Data = np.ndarray | bytes | bytearray | memoryview


class Reservation:
    """Room in the pool to be written in place: fill ``views``, then ``commit``. Leaving the block without it aborts.

    extents: where the bytes will lie. views: the same runs as writable uint8 arrays, in order.
    """

    __slots__ = ("_hold", "_pool", "_runs", "extents", "views")

    def __init__(
        self,
        pool: Pool,
        runs: tuple[Run, ...],
        hold: Hold | None,
        extents: tuple[Extent, ...],
        views: tuple[np.ndarray, ...],
    ) -> None:
        self.extents = extents
        self.views = views
        self._pool = pool
        self._runs: tuple[Run, ...] | None = runs
        self._hold = hold

    def commit(self) -> tuple[Extent, ...]:
        """Keep the bytes; returns their extents."""
        self._settle()
        return self.extents

    def abort(self) -> None:
        """Free the room again, back into the lease's promise if it came from one."""
        self._pool._give_back(self._settle(), self._hold)

    def _settle(self) -> tuple[Run, ...]:
        runs, self._runs = self._runs, None
        if runs is None:
            raise PoolError("this reservation was committed or aborted before")
        return runs

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._runs is not None:
            self.abort()


class Pool:
    """One process's end of the memory pool (FlowTrain 3.2). Thread-safe.

    process_index: this process's place in the address space, never used again in a run. node_id: equal for processes
    that share memory. run_id: unique to the run; part of the memory's name. segment_nbytes: what this process gives
    (0: it only reads). alignment: of every extent, in bytes. knob: the configuration key that sizes the segment, for
    messages. fetch_exports: what all living processes export; called when an extent cannot be resolved.
    processes_per_node: indices are given out node by node, so many to each (by default all belong to one node).
    network: how other nodes are reached, if at all; transfer_timeout_s: what one read over it may take. Raises
    ConfigError for a segment larger than the address space allows, ResourceError for a network that does not start.
    """

    def __init__(
        self,
        process_index: int,
        node_id: str,
        run_id: str,
        address_space: AddressSpace,
        segment_nbytes: int,
        alignment: int,
        knob: str,
        fetch_exports: Callable[[], Sequence[SegmentExport]],
        processes_per_node: int | None = None,
        network: Literal["none", "nixl"] = "none",
        transfer_timeout_s: float = 30.0,
    ) -> None:
        if segment_nbytes > address_space.segment_nbytes:
            raise ConfigError(
                f"{knob} ({segment_nbytes}) is larger than pool.max_segment_nbytes ({address_space.segment_nbytes}); "
                "lower the first or raise the second"
            )
        self._process_index = process_index
        self._node_id = node_id
        self._space = address_space
        self._fetch_exports = fetch_exports
        self._base = address_space.gva(Tier.DRAM, process_index, 0)
        self._lock = threading.Lock()
        self._refreshing = threading.Lock()
        self._closed = False
        self._arena = Arena(segment_nbytes, alignment, knob)
        self._arenas = {Tier.DRAM: self._arena}  # an HBM segment would stand beside it
        self._tiers = TierPolicy()
        self._segment = DramSegment(run_id, process_index, segment_nbytes) if segment_nbytes else None
        region = DramRegion(address_space, run_id, _node_block(process_index, address_space, processes_per_node))
        self._transports = TransportRegistry()
        self._transports.register(Tier.DRAM, Tier.DRAM, Distance.SAME_NODE, SharedMemoryTransport(region))
        if self._segment is not None:
            self._transports.register(Tier.DRAM, Tier.DRAM, Distance.SAME_PROCESS, LocalTransport(self._segment))
        self._network: NixlTransport | None = None
        if network == "nixl":
            self._network = NixlTransport(f"flowtrain-{run_id}-{process_index}", transfer_timeout_s)
            self._transports.register(Tier.DRAM, Tier.DRAM, Distance.OTHER_NODE, self._network)
        self._windows: dict[int, np.ndarray] = {}  # same-node peers' bound bytes, by index; what ``get`` looks at first
        self._table = PageTable(address_space)
        self._table.update(self._own_exports())

    # --- giving -------------------------------------------------------------------------------------------------

    def export(self) -> SegmentExport | None:
        """Return what peers need to read this process's segment; None for a process that only reads."""
        if self._segment is None:
            return None
        segment = self._own_segment()
        network = None if self._network is None else self._network.offer(segment.array)
        return SegmentExport(
            self._process_index, self._node_id, Tier.DRAM, os.getpid(), segment.fd, len(segment.array), network
        )

    def grow(self, segment_nbytes: int) -> SegmentExport:
        """Bind more memory, up to ``segment_nbytes`` in all; returns the export to publish anew."""
        with self._lock:
            segment = self._own_segment()
            if not len(segment.array) <= segment_nbytes <= self._space.segment_nbytes:
                raise AddressError(
                    f"a segment of {len(segment.array)} bytes cannot be grown to {segment_nbytes}; the address space "
                    f"has {self._space.segment_nbytes} (pool.max_segment_nbytes)"
                )
            segment.grow(segment_nbytes)
            self._arena.grow(segment_nbytes)
        export = self.export()
        assert export is not None
        return export

    def put(self, data: Data, hold: Hold | None = None) -> tuple[Extent, ...]:
        """Copy bytes into the own segment, on account of a lease's promise if one is given.

        data: a buffer or an array of any type, as its bytes in C order. Returns where they lie: one extent unless no
        contiguous run was free. Raises OutOfPoolMemory.
        """
        source = _as_bytes(data)
        room = self.reserve(len(source), hold)
        start = 0
        for view in room.views:
            view[:] = source[start : start + len(view)]
            start += len(view)
        return room.commit()

    def reserve(self, nbytes: int, hold: Hold | None = None) -> Reservation:
        """Make room that the caller writes in place. Raises OutOfPoolMemory."""
        with self._lock:
            array = self._own_segment().array
            tier = self._tiers.choose(nbytes, self._arenas)
            runs = self._arenas[tier].allocate(nbytes, hold)
        extents, views = [], []
        for offset, length in runs:
            extents.append(Extent(self._base + offset, length))
            views.append(array[offset : offset + length])
        return Reservation(self, runs, hold, tuple(extents), tuple(views))

    def hold(self, nbytes: int) -> Hold:
        """Promise room to the parts of a lease; ``put`` and ``reserve`` under it then succeed.

        nbytes: the sum of the parts' sizes, each rounded up to the alignment. Raises OutOfPoolMemory.
        """
        with self._lock:
            self._own_segment()
            return self._arena.hold(nbytes)

    def unhold(self, hold: Hold) -> None:
        """Give back what is left of a promise."""
        with self._lock:
            self._arena.unhold(hold)

    def release(self, extents: Sequence[Extent]) -> None:
        """Free own extents, all or none. Raises AddressError for one that is foreign, or not in use (any more)."""
        runs = [self._own_run(extent) for extent in extents]
        with self._lock:
            self._arena.free(runs)

    def stats(self) -> PoolStats:
        """Return the own segment's occupancy; promised bytes count as used, so ``free_nbytes`` can be leased."""
        with self._lock:
            arena = self._arena
            return PoolStats(
                bound_nbytes=arena.bound_nbytes,
                used_nbytes=arena.bound_nbytes - arena.available_nbytes,
                free_nbytes=arena.available_nbytes,
                largest_free_nbytes=arena.largest_free_nbytes,
                num_extents=arena.num_runs,
                fragmentation=arena.fragmentation,
            )

    # --- reading ------------------------------------------------------------------------------------------------

    def get(self, extents: Sequence[Extent]) -> np.ndarray:
        """Return the bytes of a part, uint8: a read-only zero-copy view of a single extent, else one copy.

        A view is valid until the part is released: its owner may write there again. It stays readable when the owner
        dies. Raises OwnerLostError if the owner is gone (ask the directory by position), AddressError for an extent
        outside what is bound, and for an own one that was freed.
        """
        if len(extents) == 1:
            extent = extents[0]
            index, offset = divmod(extent.gva - self._space.dram_base, self._space.segment_nbytes)
            window = self._windows.get(index)
            if window is not None and 0 < extent.nbytes <= len(window) - offset:
                return window[offset : offset + extent.nbytes]
            source, transport = self._resolve(extent)
            view = transport.view(source)
            if view is not None:
                self._open_window(source.export, transport)
                return view
        destination = np.empty(sum(extent.nbytes for extent in extents), np.uint8)
        self.read_into(extents, destination)
        return destination

    def get_batch(self, parts: Sequence[Sequence[Extent]]) -> list[np.ndarray]:
        """As ``get``, for several parts; what lies on other nodes comes by one transfer an owner."""
        runs = iter(self._read([extent for extents in parts for extent in extents]))
        found = [[next(runs) for _ in extents] for extents in parts]
        return [run[0] if len(run) == 1 else np.concatenate([np.empty(0, np.uint8), *run]) for run in found]

    def read_into(self, extents: Sequence[Extent], destination: np.ndarray) -> None:
        """Copy the bytes of a part into ``destination`` (uint8, exactly as long), for a reader's staging buffer."""
        self.read_batch_into([extents], destination)

    def read_batch_into(self, parts: Sequence[Sequence[Extent]], destination: np.ndarray) -> None:
        """As ``read_into``, for several parts one after another; batched as ``get_batch``."""
        extents = [extent for part in parts for extent in part]
        lengths = [extent.nbytes for extent in extents]
        if sum(lengths) != len(destination):
            raise PoolError(f"{sum(lengths)} bytes were read into a destination of {len(destination)}")
        places = slices(destination, lengths)
        for transport, indices, sources in self._routed(extents):
            transport.scatter(sources, [places[index] for index in indices])

    def _read(self, extents: Sequence[Extent]) -> list[np.ndarray]:
        found: dict[int, np.ndarray] = {}
        for transport, indices, sources in self._routed(extents):
            found.update(zip(indices, transport.read(sources), strict=True))
        return [found[index] for index in range(len(extents))]

    def _routed(self, extents: Sequence[Extent]) -> list[tuple[Transport, list[int], list[Mapping]]]:
        """Resolve extents and sort them by transport: each with the places in ``extents`` of what it is to read."""
        routes: dict[int, tuple[Transport, list[int], list[Mapping]]] = {}
        for index, extent in enumerate(extents):
            source, transport = self._resolve(extent)
            _, indices, sources = routes.setdefault(id(transport), (transport, [], []))
            indices.append(index)
            sources.append(source)
        return list(routes.values())

    def close(self) -> None:
        """Stop giving and reading. Views stay valid; the memory goes with the last process that maps it."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        with self._refreshing:
            self._windows.clear()
        for transport in self._transports:
            transport.close()
        if self._segment is not None:
            self._segment.close()

    def _resolve(self, extent: Extent) -> tuple[Mapping, Transport]:
        if self._closed:
            raise PoolError("this pool is closed")
        source = self._table.lookup(extent)
        if source is None:
            self._refresh()
            source = self._table.lookup(extent)
        if source is None:
            raise self._unresolved(extent)
        export = source.export
        if export.process_index == self._process_index:
            if not self._arena.is_used(source.offset, source.nbytes):
                raise AddressError(
                    f"{extent.nbytes} bytes at {extent.gva:#x} were freed, or were never put (offset {source.offset} "
                    "of the own segment)"
                )
            distance = Distance.SAME_PROCESS
        else:
            distance = Distance.SAME_NODE if export.node_id == self._node_id else Distance.OTHER_NODE
        return source, self._transports.choose(export.tier, Tier.DRAM, distance)

    def _open_window(self, export: SegmentExport, transport: Transport) -> None:
        # An own extent goes on being looked up, since it may have been freed.
        if export.process_index == self._process_index or export.node_id != self._node_id or export.tier != Tier.DRAM:
            return
        with self._refreshing:
            if not self._closed and self._table.export_of(export.tier, export.process_index) is export:
                window = transport.view(Mapping(export, 0, export.bound_nbytes))
                assert window is not None
                self._windows[export.process_index] = window

    def _refresh(self) -> None:
        """Fetch all exports anew, in one thread at a time, so that no older list replaces a newer one."""
        with self._refreshing:
            exports = [export for export in self._fetch_exports() if export.process_index != self._process_index]
            self._windows.clear()
            for segment in self._table.update([*exports, *self._own_exports()]):
                for transport in self._transports:
                    transport.drop(segment)

    def _unresolved(self, extent: Extent) -> PoolError:
        place = self._space.place(extent)
        export = self._table.export_of(place.tier, place.process_index)
        if export is None:
            return OwnerLostError(
                f"no living process exports {place.tier} segment {place.process_index} ({extent.nbytes} bytes at "
                f"{extent.gva:#x} lie there): its owner is gone; ask the directory again by position"
            )
        return AddressError(
            f"{extent.nbytes} bytes at {extent.gva:#x} end at offset {place.offset + extent.nbytes} of {place.tier} "
            f"segment {place.process_index}, of which {export.bound_nbytes} bytes are bound"
        )

    # --- own segment --------------------------------------------------------------------------------------------

    def _give_back(self, runs: Sequence[Run], hold: Hold | None) -> None:
        with self._lock:
            self._arena.give_back(runs, hold)

    def _own_segment(self) -> DramSegment:
        if self._closed:
            raise PoolError("this pool is closed")
        if self._segment is None:
            raise PoolError(f"process {self._process_index} gives no memory to the pool; it can only read")
        return self._segment

    def _own_exports(self) -> list[SegmentExport]:
        export = self.export()
        return [] if export is None else [export]

    def _own_run(self, extent: Extent) -> Run:
        place = self._space.place(extent)
        if (place.tier, place.process_index) != (Tier.DRAM, self._process_index):
            raise AddressError(
                f"process {self._process_index} cannot free {extent.nbytes} bytes at {extent.gva:#x}: they belong to "
                f"process {place.process_index} ({place.tier})"
            )
        return place.offset, extent.nbytes


def _node_block(process_index: int, space: AddressSpace, processes_per_node: int | None) -> range:
    """Return the indices that can live on the node of this process."""
    size = processes_per_node or space.num_processes
    start = process_index - process_index % size
    return range(start, min(start + size, space.num_processes))


def _as_bytes(data: Data) -> np.ndarray:
    """Return a buffer's bytes as a flat uint8 array, without copying if it is contiguous."""
    if isinstance(data, np.ndarray):
        return np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return np.frombuffer(data, np.uint8)
