"""Reads the DRAM segments of same-node peers through shared memory."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from flowtrain.mempool.page_table import Mapping, SegmentKey
from flowtrain.mempool.tiers.dram import DramRegion
from flowtrain.mempool.transports.base import Transport
from flowtrain.types.memory import Tier


class SharedMemoryTransport(Transport):
    """Zero-copy views of peers' segments, mapped into this process's DRAM region."""

    name: ClassVar[str] = "shared_memory"

    def __init__(self, region: DramRegion) -> None:
        self._region = region

    def view(self, source: Mapping) -> np.ndarray:
        """Return a peer's bytes, read-only. Raises OwnerLostError if the peer is gone and was never mapped here."""
        return self._region.view(*source)

    def drop(self, segment: SegmentKey) -> None:
        """Let go of a segment whose owner is gone; views of it stay valid."""
        tier, process_index = segment
        if tier is Tier.DRAM:
            self._region.drop(process_index)

    def close(self) -> None:
        """Let go of all segments; views stay valid."""
        self._region.close()
