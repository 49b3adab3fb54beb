"""Feasible configurations of the backbone for all settings that a plan may choose, without those never worth it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flowtrain.allocator.candidates import BoolArray, CandidateColumns, Enumeration, PruneReason, counted
from flowtrain.costs.flops import IntArray
from flowtrain.costs.training_setup import ReductionName
from flowtrain.pipeline.schedules.one_f_one_b import largest_groups
from flowtrain.types.run_plan import BackboneSettings

SLOWNESS: Mapping[str | None, int] = {"none": 0, "selective": 1, None: 1, "full": 2, "offload": 3}
"""Order of the strategies by time: what recomputes more is not faster. None: a mix, as configured."""

_UNKNOWN = -1
"""Instead of a peak that was not predicted yet."""

Shapes = tuple[CandidateColumns, Counter[PruneReason]]
"""Configurations, and the number left out."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One choice of the backbone's settings."""

    settings: BackboneSettings | None
    """None: as configured, and the only variant."""
    microbatch_tokens: int
    chunks: int
    num_microbatches: Callable[[IntArray], IntArray]
    """Microbatches of a step on each of dp ranks, ``[C]``."""
    num_shards: Callable[[CandidateColumns], IntArray]
    """DP ranks that hold one set of shards, ``[C]``; 0 where hybrid sharding cannot form equal groups."""
    peaks: Callable[[CandidateColumns], IntArray]
    """Predicted peak bytes on the fullest device, ``[C]``."""

    @property
    def word(self) -> str | None:
        """Its strategy of activation checkpointing; None: as configured."""
        return self.settings.activation_checkpointing if self.settings is not None else None

    @property
    def sharding(self) -> str | None:
        """Its sharding; None: as configured."""
        return self.settings.sharding if self.settings is not None else None


class PeakMemo:
    """Peaks of the configurations in ``shapes``, each predicted at most once, for searches in different memory.

    ``found`` has what was searched, by the bytes of memory.
    """

    def __init__(self) -> None:
        self.found: dict[int, Enumeration] = {}
        self._peaks: dict[tuple[BackboneSettings | None, ReductionName], IntArray] = {}

    def fits(
        self,
        variant: Variant,
        reduction: ReductionName,
        every: CandidateColumns,
        index: IntArray,
        memory_nbytes: int,
    ) -> tuple[BoolArray, int | None]:
        """Return which of some columns of a variant fit, ``[I]``, and the least peak of those that do not.

        every: all columns of the variant, by tp, pp and dp; they reduce gradients as ``reduction`` says. index:
        ascending. In a run of configurations (``_pivots``) none takes more than one with fewer replicas: so some of
        each run are predicted first, and then those between the last of these that does not fit and the next.
        """
        known = self._peaks.setdefault((variant.settings, reduction), np.full(len(every), _UNKNOWN))
        pivot, before, after = _pivots(variant, every, index)
        self._predict(variant, every, known, index[pivot])
        within = known[index] <= memory_nbytes  # true of those first ones alone
        between = within[after] & ~within[before]
        self._predict(variant, every, known, index[between])
        fits = np.where(pivot | between, known[index] <= memory_nbytes, within[before])
        lacking = known[index[(pivot | between) & ~fits]]
        return fits, int(lacking.min()) if len(lacking) else None

    @staticmethod
    def _predict(variant: Variant, every: CandidateColumns, known: IntArray, index: IntArray) -> None:
        missing = index[known[index] == _UNKNOWN]
        if len(missing):
            known[missing] = variant.peaks(every[missing])


def _pivots(variant: Variant, every: CandidateColumns, index: IntArray) -> tuple[BoolArray, IntArray, IntArray]:
    """Return which of some columns are predicted first, and for each the nearest of these before and after it.

    In a run of columns, more replicas never take more memory. Its columns differ in their number alone. A single
    replica, which shards nothing, is a run of its own, and where ranks have several chunks, as many microbatches go
    through a chunk at once. A run's first and last are predicted first, and some at equal distances between them.
    """
    count = len(index)
    at, tp, pp, dp = np.arange(count), every.tp[index], every.pp[index], every.dp[index]
    starts = np.ones(count, dtype=bool)
    starts[1:] = (np.diff(tp) != 0) | (np.diff(pp) != 0) | (dp[:-1] == 1)
    if variant.chunks > 1:
        num_microbatches = variant.num_microbatches(dp)
        at_once = np.where(num_microbatches >= pp, largest_groups(pp, num_microbatches), 0)
        starts[1:] |= np.diff(at_once) != 0
    ends = np.append(starts[1:], True)[:count]
    place = at - np.maximum.accumulate(np.where(starts, at, 0))
    step = max(1, math.isqrt(int(place.max(initial=0)) + 1))
    pivot = (place % step == 0) | ends
    before = np.maximum.accumulate(np.where(pivot, at, 0))
    after = np.minimum.accumulate(np.where(pivot, at, count)[::-1])[::-1]
    return pivot, before, after


def search_settings(
    variants: Sequence[Variant],
    shapes: Mapping[int, Shapes],
    memory_nbytes: int,
    reductions: Sequence[ReductionName],
    memo: PeakMemo | None = None,
) -> Enumeration:
    """Return what fits in so much memory, in the order of the variants.

    shapes: by number of chunks. reductions: in the order of preference; a later one counts where the earlier ones do
    not fit. memo: of other searches with the same variants and shapes.

    Left out are configurations that another choice of settings beats: one that recomputes less and fits, with all else
    equal; a smaller microbatch, if the step has no more of them; full sharding, where a hybrid group is all replicas.
    The first variant, as configured, loses none. Offloading is tried last, where nothing else fits at all: whether
    hosts have the memory is not known.
    """
    search = _Search(variants, shapes, memory_nbytes, reductions, memo if memo is not None else PeakMemo())
    for variant in sorted((each for each in variants if each.word != "offload"), key=_order):
        search.add(variant)
    fits = bool(search.found)
    for variant in variants:
        if variant.word == "offload" and (not fits or variant is variants[0]):
            search.add(variant)
    found = tuple(search.found[variant.settings] for variant in variants if variant.settings in search.found)
    for chunks, (_, left_out) in shapes.items():
        for reason, count in left_out.items():
            search.pruned[reason] += count * sum(variant.chunks == chunks for variant in variants)
    return Enumeration(found, counted(search.pruned), None if found else search.least_peak)


class _Search:
    """What fits so far, and what it rules out."""

    def __init__(
        self,
        variants: Sequence[Variant],
        shapes: Mapping[int, Shapes],
        memory_nbytes: int,
        reductions: Sequence[ReductionName],
        memo: PeakMemo,
    ) -> None:
        self._variants, self._shapes = variants, shapes
        self._memory_nbytes, self._reductions, self._memo = memory_nbytes, reductions, memo
        self._by_size: dict[tuple[int, str | None, str | None], dict[int, Variant]] = {}
        for each in variants:
            alike = self._by_size.setdefault((each.chunks, each.word, each.sharding), {})
            alike[each.microbatch_tokens] = each
        self._least_slowness: dict[tuple[object, ...], IntArray] = {}
        self.found: dict[BackboneSettings | None, CandidateColumns] = {}
        self.pruned: Counter[PruneReason] = Counter()
        self.least_peak: int | None = None

    def add(self, variant: Variant) -> None:
        """Add what fits of one variant and is not beaten by what is there."""
        columns = replace(self._shapes[variant.chunks][0], settings=variant.settings)
        shards = variant.num_shards(columns)
        kept = shards > 0
        self.pruned[PruneReason.SHARDS] += int(len(kept) - kept.sum())
        if variant is not self._variants[0]:
            worth = kept & ~self._is_beaten(variant, columns, shards)
            self.pruned[PruneReason.SLOWER] += int(kept.sum() - worth.sum())
            kept = worth
        left, each = np.flatnonzero(kept), np.zeros(len(columns), dtype=bool)
        fits = np.zeros(len(columns), dtype=bool)
        slowness = self._slowness_of(variant, columns)
        for reduction in self._reductions:
            if reduction == "microbatch":
                each[left] = columns.dp[left] > 1
            reducing = columns.dp > 1 if reduction == "microbatch" else np.zeros(len(columns), dtype=bool)
            every = replace(columns, reduces_each=reducing)
            within, least = self._memo.fits(variant, reduction, every, left, self._memory_nbytes)
            fits[left[within]] = True
            if reduction == self._reductions[0]:
                slowness[left[within]] = np.minimum(slowness[left[within]], SLOWNESS[variant.word])
            if least is not None:
                self.least_peak = least if self.least_peak is None else min(self.least_peak, least)
            left = left[~within]
        self.pruned[PruneReason.MEMORY] += len(left)
        if fits.any():
            self.found[variant.settings] = replace(columns, reduces_each=each)[fits]

    def _slowness_of(self, variant: Variant, columns: CandidateColumns) -> IntArray:
        """The least of ``SLOWNESS`` that fits so far, with all else as in the variant, ``[C]``."""
        key = variant.microbatch_tokens, variant.chunks, variant.sharding
        return self._least_slowness.setdefault(key, np.full(len(columns), len(SLOWNESS)))

    def _is_beaten(self, variant: Variant, columns: CandidateColumns, shards: IntArray) -> BoolArray:
        beaten: BoolArray = self._slowness_of(variant, columns) < SLOWNESS[variant.word]
        if variant.sharding == "hybrid" and variant.microbatch_tokens in self._sizes(variant, "full"):
            beaten |= shards == columns.dp
        sizes = self._sizes(variant, variant.sharding)
        smaller = [tokens for tokens in sizes if tokens < variant.microbatch_tokens]
        if smaller:
            nearest = sizes[max(smaller)]
            beaten |= nearest.num_microbatches(columns.dp) == variant.num_microbatches(columns.dp)
        return beaten

    def _sizes(self, variant: Variant, sharding: str | None) -> Mapping[int, Variant]:
        """Variants that differ by the size of microbatches alone, with this sharding, by that size."""
        return self._by_size.get((variant.chunks, variant.word, sharding), {})


def _order(variant: Variant) -> int:
    """What recomputes less comes first, so that it can beat the others."""
    return SLOWNESS[variant.word]
