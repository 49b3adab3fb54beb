"""Reads the process's own DRAM segment."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from flowtrain.mempool.page_table import Mapping
from flowtrain.mempool.tiers.dram import DramSegment
from flowtrain.mempool.transports.base import Transport


class LocalTransport(Transport):
    """Views of this process's own DRAM segment."""

    name: ClassVar[str] = "local"

    def __init__(self, segment: DramSegment) -> None:
        self._segment = segment

    def view(self, source: Mapping) -> np.ndarray:
        """Return own bytes, read-only."""
        view = self._segment.array[source.offset : source.offset + source.nbytes]
        view.flags.writeable = False
        return view
