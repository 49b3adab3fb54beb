"""Chooses the tier of a new part by high and low watermarks (FlowTrain 3.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from flowtrain.errors import ConfigError
from flowtrain.types.memory import Tier


class Occupied(Protocol):
    """Occupancy of a process's segment of one tier, in bytes, such as an ``Arena``."""

    @property
    def bound_nbytes(self) -> int:
        """Bytes of the segment."""

    @property
    def available_nbytes(self) -> int:
        """Bytes that are neither used nor promised."""


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Shares of a segment in use. Above ``high`` it takes no more parts until its use is below ``low``.

    Raises ConfigError unless 0 < low <= high <= 1.
    """

    low: float = 0.75
    high: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high <= 1:
            raise ConfigError(f"watermarks: low ({self.low:g}) and high ({self.high:g}) must be 0 < low <= high <= 1")


class TierPolicy:
    """Chooses HBM; above HBM's high watermark DRAM, until HBM is below its low one. Not thread-safe: the pool locks.

    No part is dropped: if the chosen tier has no room, its arena raises an error and the producer waits.
    """

    def __init__(self, watermarks: Watermarks | None = None) -> None:
        self._watermarks = watermarks or Watermarks()
        self._overflows = False

    def choose(self, nbytes: int, segments: Mapping[Tier, Occupied]) -> Tier:
        """Return the tier for ``nbytes``, aligned. segments: the process's own, by tier; without HBM always DRAM."""
        hbm = segments.get(Tier.HBM)
        if hbm is None:
            return Tier.DRAM
        used_nbytes = hbm.bound_nbytes - hbm.available_nbytes
        # In whole bytes: 0.29 * 100 is less than 29 as a float.
        marks = self._watermarks
        low_nbytes, high_nbytes = round(marks.low * hbm.bound_nbytes), round(marks.high * hbm.bound_nbytes)
        self._overflows = used_nbytes >= low_nbytes if self._overflows else used_nbytes > high_nbytes
        return Tier.DRAM if self._overflows or nbytes > hbm.available_nbytes else Tier.HBM
