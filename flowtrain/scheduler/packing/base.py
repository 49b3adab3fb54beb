"""The interface of a packing method: a function of lengths and rules that returns bins and keeps no state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from flowtrain.costs.flops import FloatArray, IntArray
from flowtrain.scheduler.compiled import compiled
from flowtrain.scheduler.packing.sorting import group
from flowtrain.types.plan import CostModel


@dataclass(frozen=True, slots=True)
class Lengths:
    """Sizes of the samples, in their order: all that a packer sees of them."""

    tokens: IntArray
    """Backbone tokens of each sample, 1 to the capacity; int64 ``[num_samples]``."""
    vision: IntArray
    """Work of the vision encoder for each sample, in vision tokens, patches or tiles (0: text only); int64
    ``[num_samples]``."""

    @classmethod
    def of(cls, tokens: Iterable[int], vision: Iterable[int] | None = None) -> Lengths:
        """Build from any integers; without ``vision`` all samples are text."""
        lengths = np.array(list(tokens), dtype=np.int64)
        return cls(lengths, np.zeros_like(lengths) if vision is None else np.array(list(vision), dtype=np.int64))

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class PackingRules:
    """The rules that the bins of a unit follow."""

    capacity: int
    """Most tokens in a bin."""
    cost: CostModel
    """Cost of a bin."""
    dp_size: int = 1
    """Number of ranks that the bins are dealt to, the same number to each."""
    seed: int = 0
    """For methods that draw random numbers; the same seed gives the same bins."""
    vision_quota: int | None = None
    """Most vision work in a bin, for ``groups``; None: any."""


@dataclass(frozen=True, slots=True, eq=False)
class Bins:
    """Bins of sample indices; every index occurs in exactly one bin, and indices inside a bin ascend."""

    members: IntArray
    """Sample indices, bin after bin; int64 ``[num_samples]``."""
    offsets: IntArray
    """Bin ``b`` is ``members[offsets[b]:offsets[b + 1]]``; int64 ``[num_bins + 1]``."""

    @classmethod
    def of(cls, bins: Iterable[Sequence[int]]) -> Bins:
        """Build from one sequence of sample indices per bin."""
        lists = [sorted(members) for members in bins]
        offsets = np.zeros(len(lists) + 1, dtype=np.int64)
        np.cumsum([len(members) for members in lists], out=offsets[1:])
        return cls(np.array([index for members in lists for index in members], dtype=np.int64), offsets)

    @classmethod
    def by_number(cls, number: IntArray, num_bins: int) -> Bins:
        """Build from each sample's bin number; int64 ``[num_samples]``, 0 to ``num_bins - 1``."""
        return cls(*group(number, num_bins))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        members, ends = self.members.tolist(), self.offsets.tolist()
        return (tuple(members[start:end]) for start, end in pairwise(ends))

    def tokens(self, lengths: Lengths) -> IntArray:
        """Return the tokens in each bin; int64 ``[num_bins]``."""
        return _sums(lengths.tokens, self.members, self.offsets)

    def vision(self, lengths: Lengths) -> IntArray:
        """Return the vision encoder's work in each bin; int64 ``[num_bins]``."""
        return _sums(lengths.vision, self.members, self.offsets)

    def costs(self, lengths: Lengths, cost: CostModel) -> FloatArray:
        """Return each bin's cost; float64 ``[num_bins]``. An empty bin costs nothing."""
        coefficients = cost.constant, cost.per_token, cost.per_longest, cost.per_square
        return _costs(lengths.tokens, self.members, self.offsets, *coefficients)


@compiled
def _sums(values: IntArray, members: IntArray, offsets: IntArray) -> IntArray:
    sums = np.zeros(len(offsets) - 1, dtype=np.int64)
    for bin_ in range(len(sums)):
        for place in range(offsets[bin_], offsets[bin_ + 1]):
            sums[bin_] += values[members[place]]
    return sums


@compiled
def _costs(
    sizes: IntArray,
    members: IntArray,
    offsets: IntArray,
    constant: float,
    per_token: float,
    per_longest: float,
    per_square: float,
) -> FloatArray:
    """``CostModel.of_sums`` of each bin."""
    costs = np.zeros(len(offsets) - 1)
    for bin_ in range(len(costs)):
        tokens, longest, squares = 0, 0, 0
        for place in range(offsets[bin_], offsets[bin_ + 1]):
            size = sizes[members[place]]
            tokens += size
            squares += size * size
            longest = max(longest, size)
        if tokens:
            costs[bin_] = constant + per_token * tokens + per_longest * longest**2 + per_square * squares
    return costs


class Packer(Protocol):
    """A pure, deterministic packing method."""

    def __call__(self, lengths: Lengths, rules: PackingRules) -> Bins:
        """Put every sample into one bin, with at most ``rules.capacity`` tokens in a bin.

        No length exceeds the capacity: the step planner refuses longer samples. The number of bins need not be a
        multiple of ``rules.dp_size``; the planner splits bins until it is.
        """
        ...
