"""The interface of a packing method: lengths and costs in, bins out, nothing else seen and nothing kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Bins = tuple[tuple[int, ...], ...]
"""Bins of sample indices; indices inside a bin ascend, and every index occurs in exactly one bin."""


class Packer(Protocol):
    """A pure, deterministic packing method."""

    def __call__(self, lengths: Sequence[int], costs: Sequence[float], capacity: int) -> Bins:
        """Put every sample into one bin, no bin holding more than ``capacity`` tokens.

        lengths: tokens of each sample, 1 to ``capacity`` (the step planner refuses others before). costs: of each
        sample alone, by the run's cost model; methods that only fill may ignore them. capacity: in tokens.
        """
        ...
