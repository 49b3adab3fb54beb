"""The reading half of a pool: it resolves addresses and reads the bytes by the transport that reaches their owner."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from flowtrain.errors import AddressError, OwnerLostError, PoolError
from flowtrain.mempool.gva import AddressSpace
from flowtrain.mempool.page_table import Mapping, PageTable
from flowtrain.mempool.transports.base import Arrival, Distance, Transport, slices
from flowtrain.mempool.transports.registry import TransportRegistry
from flowtrain.types.memory import Extent, SegmentExport, Tier

if TYPE_CHECKING:
    from torch import Tensor

Part = Sequence[Extent]


class PendingBatch:
    """A read of parts in progress. ``result`` waits for it; if it is dropped unread, its buffers are given back."""

    def __init__(
        self, reader: PoolReader, lengths: Sequence[int], arrivals: Sequence[tuple[Arrival, Sequence[int]]]
    ) -> None:
        self._reader = reader
        self._lengths = lengths
        self._arrivals: Sequence[tuple[Arrival, Sequence[int]]] | None = arrivals

    def result(self) -> list[np.ndarray]:
        """Return the bytes of each part, uint8: a read-only view of a single extent, a copy of several. Call it once.

        Waits for the network at most ``pool.transfer_timeout_s``. Raises OwnerLostError, which names the owner and the
        missing bytes, if an owner is gone or after that time.
        """
        arrivals, self._arrivals = self._arrivals, None
        if arrivals is None:
            raise PoolError("the result of this batch was taken before, or failed")
        with self._reader.noticing_losses():
            found = [(arrival.wait(), indices) for arrival, indices in arrivals]
        if len(found) == 1:
            runs = found[0][0]  # in order
        else:
            by_index = {index: run for data, indices in found for index, run in zip(indices, data, strict=True)}
            runs = [by_index[index] for index in range(len(by_index))]
        if all(length == 1 for length in self._lengths):
            return runs
        in_order = iter(runs)
        parts = [[next(in_order) for _ in range(length)] for length in self._lengths]
        return [part[0] if len(part) == 1 else np.concatenate([np.empty(0, np.uint8), *part]) for part in parts]


class PoolReader:
    """Reads the segments of all processes. Thread-safe.

    process_index, node_id: of this process.
    space: the pool's address space.
    transports: the transports by route; closed with the reader.
    own_exports: returns this process's own exports.
    is_used: whether bytes of an own segment are in use, by tier, offset and length.
    fetch_exports: as of a ``Pool``.
    """

    def __init__(
        self,
        process_index: int,
        node_id: str,
        space: AddressSpace,
        transports: TransportRegistry,
        own_exports: Callable[[], Sequence[SegmentExport]],
        is_used: Callable[[Tier, int, int], bool],
        fetch_exports: Callable[[], Sequence[SegmentExport]],
    ) -> None:
        self._process_index = process_index
        self._node_id = node_id
        self._space = space
        self._transports = transports
        self._own_exports = own_exports
        self._is_used = is_used
        self._fetch_exports = fetch_exports
        self._refreshing = threading.Lock()
        self._closed = False
        self._counting = threading.Lock()
        self._read_nbytes: Counter[str] = Counter()
        self._windows: dict[int, np.ndarray] = {}  # bound bytes of same-node peers, by index; ``get`` looks here first
        self._table = PageTable(space)
        self._table.update(own_exports())

    def get(self, extents: Part) -> np.ndarray:
        """As ``Pool.get``."""
        if len(extents) == 1:
            extent = extents[0]
            nbytes = extent.nbytes
            index, offset = divmod(extent.gva - self._space.dram_base, self._space.segment_nbytes)
            window = self._windows.get(index)
            if window is not None and 0 < nbytes <= len(window) - offset:
                return window[offset : offset + nbytes]
            source, transport = self._resolve(extent)
            with self.noticing_losses():
                view = transport.view(source)
            if view is not None:
                self._open_window(source.export, transport)
                return view
        destination = np.empty(sum(extent.nbytes for extent in extents), np.uint8)
        self.read_batch_into([extents], destination)
        return destination

    def prefetch(self, parts: Sequence[Part]) -> PendingBatch:
        """As ``Pool.prefetch``."""
        with self.noticing_losses():
            arrivals = [
                (transport.start(sources), indices)
                for transport, indices, sources in self._routed([extent for part in parts for extent in part])
            ]
        return PendingBatch(self, [len(part) for part in parts], arrivals)

    def read_batch_into(self, parts: Sequence[Part], destination: np.ndarray) -> None:
        """As ``Pool.read_batch_into``."""
        extents = [extent for part in parts for extent in part]
        lengths = [extent.nbytes for extent in extents]
        if sum(lengths) != len(destination):
            raise PoolError(f"{sum(lengths)} bytes were read into a destination of {len(destination)}")
        places = slices(destination, lengths)
        with self.noticing_losses():
            for transport, indices, sources in self._routed(extents):
                transport.scatter(sources, [places[index] for index in indices])

    def copy_to_device(self, extents: Part, destinations: Sequence[Tensor]) -> None:
        """As ``Pool.copy_to_device``."""
        with self.noticing_losses():
            for transport, indices, sources in self._routed(extents):
                transport.copy(sources, [destinations[index] for index in indices])

    def close(self) -> None:
        """Stop reading. Views stay valid."""
        with self._refreshing:
            self._closed = True
            self._windows.clear()
        for transport in self._transports:
            transport.close()

    @contextmanager
    def noticing_losses(self) -> Iterator[None]:
        """If the block finds an owner gone, let go of the segments of all processes that are gone."""
        try:
            yield
        except OwnerLostError:
            self.refresh()
            raise

    def take_read_nbytes(self) -> dict[str, int]:
        """As ``Pool.take_read_nbytes``."""
        with self._counting:
            read = dict(self._read_nbytes)
            self._read_nbytes.clear()
        return read

    def refresh(self) -> None:
        """Fetch all exports again, in one thread at a time, so that no older list replaces a newer one."""
        with self._refreshing:
            exports = [export for export in self._fetch_exports() if export.process_index != self._process_index]
            self._windows.clear()
            for segment in self._table.update([*exports, *self._own_exports()]):
                for transport in self._transports:
                    transport.drop(segment)

    def _routed(self, extents: Part) -> list[tuple[Transport, list[int], list[Mapping]]]:
        """Resolve extents and group them by transport, each with its indices in ``extents`` and its sources."""
        routes: dict[int, tuple[Transport, list[int], list[Mapping]]] = {}
        # Extents of a batch lie in few segments: the segment of one extent mostly serves those after it.
        indices: list[int] = []
        sources: list[Mapping] = []
        export: SegmentExport | None = None
        base = end = 0
        for index, extent in enumerate(extents):
            gva, nbytes = extent.gva, extent.nbytes
            if export is not None and base <= gva and 0 < nbytes <= end - gva:
                indices.append(index)
                sources.append(Mapping(export, gva - base, nbytes))
                continue
            source, transport = self._resolve(extent)
            _, indices, sources = routes.setdefault(id(transport), (transport, [], []))
            indices.append(index)
            sources.append(source)
            export = source.export
            base = gva - source.offset
            end = base if export.process_index == self._process_index else base + export.bound_nbytes
        with self._counting:
            for transport, _, sources in routes.values():
                self._read_nbytes[transport.name] += sum([source.nbytes for source in sources])
        return list(routes.values())

    def _resolve(self, extent: Extent) -> tuple[Mapping, Transport]:
        if self._closed:
            raise PoolError("this pool is closed")
        source = self._table.lookup(extent)
        if source is None:
            self.refresh()
            source = self._table.lookup(extent)
        if source is None:
            raise self._unresolved(extent)
        export = source.export
        if export.process_index == self._process_index:
            if not self._is_used(export.tier, source.offset, source.nbytes):
                raise AddressError(
                    f"{extent.nbytes} bytes at {extent.gva:#x} were freed, or were never put (offset {source.offset} "
                    "of the own segment)"
                )
            distance = Distance.SAME_PROCESS
        elif export.node_id != self._node_id:
            distance = Distance.OTHER_NODE
        else:
            distance = Distance.SAME_NODE if export.socket is None else Distance.PRIVATE
        return source, self._transports.choose(export.tier, Tier.DRAM, distance)

    def _open_window(self, export: SegmentExport, transport: Transport) -> None:
        # An own extent is looked up at every read, since it may have been freed.
        if export.process_index == self._process_index or export.node_id != self._node_id or export.tier != Tier.DRAM:
            return
        with self._refreshing:
            if not self._closed and self._table.export_of(export.tier, export.process_index) is export:
                window = transport.view(Mapping(export, 0, export.bound_nbytes))
                assert window is not None
                self._windows[export.process_index] = window

    def _unresolved(self, extent: Extent) -> PoolError:
        place = self._space.place(extent)
        export = self._table.export_of(place.tier, place.process_index)
        if export is None:
            return OwnerLostError(
                f"no living process exports {place.tier} segment {place.process_index} ({extent.nbytes} bytes at "
                f"{extent.gva:#x} lie there): its owner is gone; ask the coordinator again by position"
            )
        return AddressError(
            f"{extent.nbytes} bytes at {extent.gva:#x} end at offset {place.offset + extent.nbytes} of {place.tier} "
            f"segment {place.process_index}, of which {export.bound_nbytes} bytes are bound"
        )
