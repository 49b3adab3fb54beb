"""Reads of HBM segments: the own segment, and those of same-node peers through the device runtime's IPC."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from flowtrain.mempool.page_table import Mapping, SegmentKey
from flowtrain.mempool.tiers.hbm import HbmRegion, HbmSegment
from flowtrain.mempool.transports.base import Transport
from flowtrain.types.memory import SegmentExport, Tier


class DeviceTransport(Transport):
    """Copies out of device memory, to the host or within the device. It has no views: memory goes with its owner.

    device: the device that this process computes on. Copies run on its current stream; they are complete when a call
        returns.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def view(self, source: Mapping) -> None:
        """Return None: numpy has no view of device memory."""

    def read(self, sources: Sequence[Mapping]) -> list[np.ndarray]:
        """Return copies on the host. Raises OwnerLostError if an owner is gone."""
        found = [np.empty(source.nbytes, np.uint8) for source in sources]
        self.scatter(sources, found)
        return found

    def scatter(self, sources: Sequence[Mapping], destinations: Sequence[np.ndarray]) -> None:
        """Copy the bytes of each source to the host. Raises OwnerLostError if an owner is gone."""
        self.copy(sources, [torch.from_numpy(destination) for destination in destinations])

    def copy(self, sources: Sequence[Mapping], destinations: Sequence[torch.Tensor]) -> None:
        """Copy each source into its destination (uint8, of the same length), on the host or the device.

        Raises OwnerLostError if an owner is gone; the copied bytes must not be used then.
        """
        exports = {source.export.process_index: source.export for source in sources}.values()
        for export in exports:  # a read of freed memory would break this process's device context
            self._check(export)
        try:
            for (export, offset, nbytes), destination in zip(sources, destinations, strict=True):
                destination.copy_(self._tensor(export)[offset : offset + nbytes], non_blocking=True)
            torch.accelerator.current_stream(self._device).synchronize()
        finally:
            # Again, since an owner may die at any moment, and another process may then get its memory.
            for export in exports:
                self._check(export)

    @abstractmethod
    def _tensor(self, export: SegmentExport) -> torch.Tensor:
        """Return a segment's bytes, uint8 on the device."""

    def _check(self, export: SegmentExport) -> None:
        """Raise OwnerLostError if the owner is gone."""


class HbmLocalTransport(DeviceTransport):
    """Reads this process's own HBM segment."""

    name: ClassVar[str] = "local"

    def __init__(self, device: torch.device, segment: HbmSegment) -> None:
        super().__init__(device)
        self._segment = segment

    def _tensor(self, export: SegmentExport) -> torch.Tensor:
        return self._segment.tensor


class DeviceIpcTransport(DeviceTransport):
    """Reads the HBM segments of same-node peers."""

    name: ClassVar[str] = "device_ipc"

    def __init__(self, device: torch.device, region: HbmRegion) -> None:
        super().__init__(device)
        self._region = region

    def drop(self, segment: SegmentKey) -> None:
        """Let go of a segment whose owner is gone."""
        tier, process_index = segment
        if tier is Tier.HBM:
            self._region.drop(process_index)

    def close(self) -> None:
        """Let go of all segments."""
        self._region.close()

    def _tensor(self, export: SegmentExport) -> torch.Tensor:
        return self._region.tensor(export)

    def _check(self, export: SegmentExport) -> None:
        self._region.check_owner(export)
