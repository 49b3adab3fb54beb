"""The pool of a process with an accelerator, in addition to DRAM: its part of the HBM tier, and page-locked memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

import torch

from flowtrain.mempool.arena import Arena, Run
from flowtrain.mempool.gva import AddressSpace
from flowtrain.mempool.tiers.hbm import KNOB, HbmRegion, HbmSegment
from flowtrain.mempool.tiers.page_lock import PageLock
from flowtrain.mempool.transports.base import Distance
from flowtrain.mempool.transports.device_ipc import DeviceIpcTransport, HbmLocalTransport
from flowtrain.mempool.transports.registry import TransportRegistry
from flowtrain.mempool.watermarks import TierPolicy, Watermarks
from flowtrain.types.memory import Extent, SegmentExport, Tier


class DeviceSide:
    """A process's part of the HBM tier (FlowTrain 3.2). Thread-safe.

    HBM is extra memory. Every lease has a promise of DRAM, so if the device is full, parts lie in DRAM. The check that
    the pool is large enough does not count HBM.

    process_index, node_id, space, alignment: as of its ``Pool``.
    device: an accelerator for which ``why_absent`` returns None.
    segment_nbytes: bytes that this process gives; 0: it only reads.
    watermarks: when parts go to DRAM.

    Raises ResourceError if the device does not have that much memory.
    """

    def __init__(
        self,
        process_index: int,
        node_id: str,
        space: AddressSpace,
        device: torch.device,
        segment_nbytes: int,
        alignment: int,
        watermarks: Watermarks,
    ) -> None:
        self._process_index = process_index
        self._node_id = node_id
        self._base = space.gva(Tier.HBM, process_index, 0)
        self._device = device
        self._lock = threading.Lock()
        self._arena = Arena(segment_nbytes, alignment, KNOB)
        self._policy = TierPolicy(watermarks)
        self._segment = HbmSegment(device, segment_nbytes) if segment_nbytes else None
        self.pages = PageLock(device)

    def register(self, transports: TransportRegistry) -> None:
        """Serve the routes from HBM on this node."""
        peers = DeviceIpcTransport(self._device, HbmRegion(self._device))
        for destination in (Tier.HBM, Tier.DRAM):
            transports.register(Tier.HBM, destination, Distance.SAME_NODE, peers)
        if self._segment is not None:
            own = HbmLocalTransport(self._device, self._segment)
            for destination in (Tier.HBM, Tier.DRAM):
                transports.register(Tier.HBM, destination, Distance.SAME_PROCESS, own)

    def export(self) -> SegmentExport | None:
        """Return what peers need to read this process's HBM; None if it gives none."""
        if self._segment is None:
            return None
        nbytes = len(self._segment.tensor)
        device = self._segment.export
        return SegmentExport(self._process_index, self._node_id, Tier.HBM, os.getpid(), -1, nbytes, device=device)

    def write(self, nbytes: int, fill: Callable[[torch.Tensor], None]) -> tuple[Extent, ...] | None:
        """Let ``fill`` write a part in place, uint8 ``[nbytes]`` on the device, if the policy puts it into HBM.

        Returns its extent, which peers may read from now on. None if the part goes to DRAM: above the watermark, or if
        no run of the segment is long enough.
        """
        with self._lock:
            segment, need = self._segment, self._arena.aligned(nbytes)
            if segment is None or not nbytes or self._policy.choose(need, {Tier.HBM: self._arena}) is not Tier.HBM:
                return None
            if need > self._arena.largest_free_nbytes:
                return None
            runs = self._arena.allocate(nbytes)
        ((offset, _),) = runs
        try:
            fill(segment.tensor[offset : offset + nbytes])
            torch.accelerator.current_stream(self._device).synchronize()
        except BaseException:
            self.free(runs)
            raise
        return (Extent(self._base + offset, nbytes),)

    def is_used(self, offset: int, nbytes: int) -> bool:
        """Whether these bytes of the own segment are in use."""
        with self._lock:
            return self._arena.is_used(offset, nbytes)

    def split(self, extents: Sequence[Extent]) -> tuple[list[Run], list[Extent]]:
        """Return the extents in own HBM, as runs of the segment, and the other extents."""
        end = self._base + self._arena.bound_nbytes
        own = [(extent.gva - self._base, extent.nbytes) for extent in extents if self._base <= extent.gva < end]
        return own, [extent for extent in extents if not self._base <= extent.gva < end]

    def free(self, runs: Sequence[Run]) -> None:
        """Free own runs, all or none. Raises AddressError for a run that is not in use."""
        with self._lock:
            self._arena.free(runs)

    def close(self) -> None:
        """Stop giving memory. The pool must close its transports first."""
        with self._lock:
            segment, self._segment = self._segment, None
        if segment is not None:
            segment.close()
