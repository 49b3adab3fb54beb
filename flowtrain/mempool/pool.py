"""The client of the unified memory pool. A process puts into its own segment and reads all segments by address."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np

from flowtrain.errors import AddressError, ConfigError, PoolError
from flowtrain.mempool.arena import Arena, Hold, Run
from flowtrain.mempool.gva import AddressSpace
from flowtrain.mempool.reading import PendingBatch, PoolReader
from flowtrain.mempool.reservation import Reservation, room_of
from flowtrain.mempool.tiers.dram import DramRegion, DramSegment
from flowtrain.mempool.transports.base import Distance
from flowtrain.mempool.transports.local import LocalTransport
from flowtrain.mempool.transports.nixl import NixlTransport
from flowtrain.mempool.transports.point_to_point import PointToPointTransport
from flowtrain.mempool.transports.registry import TransportRegistry
from flowtrain.mempool.transports.shared_memory import SharedMemoryTransport
from flowtrain.mempool.transports.socket_server import SocketServer
from flowtrain.types.memory import Extent, PoolStats, SegmentExport, Tier

if TYPE_CHECKING:
    from torch import Tensor

    from flowtrain.mempool.device_side import DeviceSide

Data = np.ndarray | bytes | bytearray | memoryview


class Pool:
    """One process's part of the memory pool (FlowTrain 3.2). Thread-safe.

    process_index: this process's place in the address space, never used again in a run.
    node_id: equal for processes that share memory.
    run_id: unique to the run; part of the memory's name.
    segment_nbytes: DRAM that this process gives; 0: it only reads.
    alignment: of every extent, in bytes.
    knob: configuration key that sets the segment's size, for messages.
    fetch_exports: returns the exports of all living processes; called when an extent cannot be resolved.
    processes_per_node: size of each node's block of indices; None: all indices belong to one node.
    network: how other nodes are reached; ``none``: not at all.
    transfer_timeout_s: longest time of one read over the network.
    device: this process's part of the pool on its accelerator; closed with the pool.
    is_sparse: pages of the segment take memory when they are first used, not at once.
    is_private: peers do not map the segment, but receive bytes over a socket (``pool.exchange: point_to_point``).

    Raises ConfigError for a segment larger than the address space allows, ResourceError for a network that does not
    start.
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
        device: DeviceSide | None = None,
        is_sparse: bool = False,
        is_private: bool = False,
    ) -> None:
        if segment_nbytes > address_space.segment_nbytes:
            raise ConfigError(
                f"{knob} ({segment_nbytes}) is larger than pool.max_segment_nbytes ({address_space.segment_nbytes}); "
                "lower the first or raise the second"
            )
        self._process_index = process_index
        self._node_id = node_id
        self._space = address_space
        self._base = address_space.gva(Tier.DRAM, process_index, 0)
        self._lock = threading.Lock()
        self._closed = False
        self._arena = Arena(segment_nbytes, alignment, knob)
        self._device = device
        pages = None if device is None else device.pages
        self._segment = DramSegment(run_id, process_index, segment_nbytes, pages, is_sparse) if segment_nbytes else None
        self._array = None if self._segment is None else self._segment.array
        region = DramRegion(address_space, run_id, _node_block(process_index, address_space, processes_per_node))
        transports = TransportRegistry()
        transports.register(Tier.DRAM, Tier.DRAM, Distance.SAME_NODE, SharedMemoryTransport(region))
        transports.register(Tier.DRAM, Tier.DRAM, Distance.PRIVATE, PointToPointTransport(transfer_timeout_s))
        self._server: SocketServer | None = None
        if self._segment is not None:
            transports.register(Tier.DRAM, Tier.DRAM, Distance.SAME_PROCESS, LocalTransport(self._segment))
            self._server = SocketServer(partial(getattr, self._segment, "array")) if is_private else None
        self._network: NixlTransport | None = None
        if network == "nixl":
            self._network = NixlTransport(f"flowtrain-{run_id}-{process_index}", transfer_timeout_s)
            transports.register(Tier.DRAM, Tier.DRAM, Distance.OTHER_NODE, self._network)
        if device is not None:
            device.register(transports)
        self._reader = PoolReader(
            process_index, node_id, address_space, transports, self.exports, self._is_used, fetch_exports
        )

    # --- giving -------------------------------------------------------------------------------------------------

    def export(self) -> SegmentExport | None:
        """Return what peers need to read this process's DRAM; None if it gives none."""
        if self._segment is None:
            return None
        segment = self._own_segment()
        network = None if self._network is None else self._network.offer(segment.array)
        fd, offer = (segment.fd, None) if self._server is None else (-1, self._server.offer)
        nbytes, pid = len(segment.array), os.getpid()
        return SegmentExport(self._process_index, self._node_id, Tier.DRAM, pid, fd, nbytes, network, socket=offer)

    def exports(self) -> list[SegmentExport]:
        """Return what peers need to read this process's segments, one per tier."""
        found = [self.export(), None if self._device is None else self._device.export()]
        return [export for export in found if export is not None]

    def grow(self, segment_nbytes: int) -> SegmentExport:
        """Bind more memory, up to ``segment_nbytes`` in all. Returns the new export, to be published."""
        with self._lock:
            segment = self._own_segment()
            if not len(segment.array) <= segment_nbytes <= self._space.segment_nbytes:
                raise AddressError(
                    f"a segment of {len(segment.array)} bytes cannot be grown to {segment_nbytes}; the address space "
                    f"has {self._space.segment_nbytes} (pool.max_segment_nbytes)"
                )
            segment.grow(segment_nbytes)
            self._array = segment.array
            self._arena.grow(segment_nbytes)
        export = self.export()
        assert export is not None
        return export

    def put(self, data: Data, hold: Hold | None = None) -> tuple[Extent, ...]:
        """Copy bytes into the own segment. Returns where they lie: one extent unless no contiguous run was long enough.

        data: a buffer, or an array of any type; its bytes in C order are copied.
        hold: promise of a lease from which the room is taken.

        Raises OutOfPoolMemory.
        """
        source = _as_bytes(data)
        room = self.reserve(len(source), hold)
        start = 0
        for view in room.views:
            view[:] = source[start : start + len(view)]
            start += len(view)
        return room.commit()

    def reserve(self, nbytes: int, hold: Hold | None = None) -> Reservation:
        """Reserve room that the caller writes in place, from a promise if one is given. Raises OutOfPoolMemory."""
        lock = self._lock
        lock.acquire()  # not `with`: its look-ups take 8 us after a large payload has emptied the caches
        try:
            array = self._array
            if array is None:
                array = self._own_segment().array
            runs = self._arena.allocate(nbytes, hold)
        finally:
            lock.release()
        return room_of(self, self._base, array, runs, hold)

    def write_on_device(self, nbytes: int, fill: Callable[[Tensor], None]) -> tuple[Extent, ...] | None:
        """Let ``fill`` write a part into HBM, as ``DeviceSide.write``; None if the part goes to DRAM."""
        return None if self._device is None else self._device.write(nbytes, fill)

    def give_back(self, extents: Sequence[Extent], hold: Hold | None) -> None:
        """Free own extents that no process knows of, into the promise they came from; for aborted reservations."""
        runs = [self._own_run(extent) for extent in extents]
        with self._lock:
            self._arena.give_back(runs, hold)

    def hold(self, nbytes: int) -> Hold:
        """Promise room to the parts of a lease. ``put`` and ``reserve`` under the promise then succeed.

        nbytes: sum of the parts' sizes, each rounded up to the alignment. Raises OutOfPoolMemory.
        """
        with self._lock:
            self._own_segment()
            return self._arena.hold(nbytes)

    def unhold(self, hold: Hold) -> None:
        """Give back the rest of a promise."""
        with self._lock:
            self._arena.unhold(hold)

    def release(self, extents: Sequence[Extent]) -> None:
        """Free own extents, all or none of a tier. Raises AddressError for one of another process, or not in use."""
        on_device: list[Run] = []
        if self._device is not None:
            on_device, extents = self._device.split(extents)
        runs = [self._own_run(extent) for extent in extents]
        with self._lock:
            self._arena.free(runs)
        if self._device is not None:
            self._device.free(on_device)

    def stats(self) -> PoolStats:
        """Return the own segment's occupancy. Promised bytes count as used, so ``free_nbytes`` can be leased."""
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
        """Return the bytes of a part, uint8: a read-only zero-copy view of a single extent, a copy of several.

        A view is valid until the part is released; then its owner may write there again. It stays readable after the
        owner's death. Raises OwnerLostError if the owner is gone (ask the coordinator by position), AddressError for an
        extent outside the bound bytes, and for an own extent that was freed.
        """
        return self._reader.get(extents)

    def get_batch(self, parts: Sequence[Sequence[Extent]]) -> list[np.ndarray]:
        """As ``get``, for several parts. Parts on other nodes come in one transfer per owner."""
        return self._reader.prefetch(parts).result()

    def prefetch(self, parts: Sequence[Sequence[Extent]]) -> PendingBatch:
        """Start transfers from other nodes, and return at once. ``PendingBatch.result`` returns the bytes.

        If the network reads memory by itself (RDMA), transfers run in the meantime. If it cannot (TCP), they are
        requested now and continue in ``result()``. Parts on this node are viewed now. Both calls raise as ``get``.
        """
        return self._reader.prefetch(parts)

    def read_into(self, extents: Sequence[Extent], destination: np.ndarray) -> None:
        """Copy the bytes of a part into ``destination`` (uint8, exactly as long), such as a staging buffer."""
        self._reader.read_batch_into([extents], destination)

    def read_batch_into(self, parts: Sequence[Sequence[Extent]], destination: np.ndarray) -> None:
        """As ``read_into``, for several parts one after another, in one batch as ``get_batch``."""
        self._reader.read_batch_into(parts, destination)

    def copy_to_device(self, extents: Sequence[Extent], destinations: Sequence[Tensor]) -> None:
        """Copy extents of the HBM tier, each into a tensor (uint8, as long) on this process's device.

        The copies are complete when this returns. Raises OwnerLostError as ``get``, PoolError without an HBM tier here.
        """
        self._reader.copy_to_device(extents, destinations)

    def take_read_nbytes(self) -> dict[str, int]:
        """Return the bytes that this process has read since the last call, by transport, without views of ``get``."""
        return self._reader.take_read_nbytes()

    def tier_of(self, extent: Extent) -> Tier:
        """Return the tier that an extent lies in."""
        return self._space.translate(extent.gva).tier

    def close(self) -> None:
        """Stop giving and reading. Views stay valid; the memory is freed with the last process that maps it."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._array = None
        self._reader.close()
        if self._device is not None:
            self._device.close()
        if self._server is not None:
            self._server.close()
        if self._segment is not None:
            self._segment.close()

    # --- own segment --------------------------------------------------------------------------------------------

    def _is_used(self, tier: Tier, offset: int, nbytes: int) -> bool:
        if tier is Tier.HBM:
            return self._device is not None and self._device.is_used(offset, nbytes)
        return self._arena.is_used(offset, nbytes)

    def _own_segment(self) -> DramSegment:
        if self._closed:
            raise PoolError("this pool is closed")
        if self._segment is None:
            raise PoolError(f"process {self._process_index} gives no memory to the pool; it can only read")
        return self._segment

    def _own_run(self, extent: Extent) -> Run:
        place = self._space.place(extent)
        if (place.tier, place.process_index) != (Tier.DRAM, self._process_index):
            raise AddressError(
                f"process {self._process_index} cannot free {extent.nbytes} bytes at {extent.gva:#x}: they belong to "
                f"process {place.process_index} ({place.tier})"
            )
        return place.offset, extent.nbytes


def _node_block(process_index: int, space: AddressSpace, processes_per_node: int | None) -> range:
    """Return the indices that processes on this process's node can have."""
    size = processes_per_node or space.num_processes
    start = process_index - process_index % size
    return range(start, min(start + size, space.num_processes))


def _as_bytes(data: Data) -> np.ndarray:
    """Return a buffer's bytes as a flat uint8 array, without copying if it is contiguous."""
    if isinstance(data, np.ndarray):
        return np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return np.frombuffer(data, np.uint8)
