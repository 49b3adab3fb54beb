"""Feasible configurations of the backbone for all settings that a plan may choose, without those never worth it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flowtrain.allocator.candidates import BoolArray, CandidateColumns, Enumeration, PruneReason, counted
from flowtrain.costs.flops import IntArray
from flowtrain.costs.training_setup import ReductionName
from flowtrain.pipeline.schedules.one_f_one_b import largest_groups
from flowtrain.scheduler.compiled import compiled
from flowtrain.types.run_plan import BackboneSettings

SLOWNESS: Mapping[str | None, int] = {"none": 0, "selective": 1, None: 1, "full": 2, "offload": 3}
"""Order of the strategies by time: what recomputes more is not faster. None: a mix, as configured."""

_UNKNOWN = -1
"""Instead of a peak that was not predicted yet."""
_MOST_TOGETHER = 1 << 16
"""Configurations of variants that are searched at once, so that arrays stay in the caches."""

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

    @property
    def word(self) -> str | None:
        """Its strategy of activation checkpointing; None: as configured."""
        return self.settings.activation_checkpointing if self.settings is not None else None

    @property
    def sharding(self) -> str | None:
        """Its sharding; None: as configured."""
        return self.settings.sharding if self.settings is not None else None


@dataclass(frozen=True, slots=True, eq=False)
class Alike:
    """Variants that differ in their microbatches and their sharding alone, each with the same configurations.

    Arrays over both are ``[V, C]``; a place counts the configurations of one variant after those of the other.
    """

    variants: tuple[Variant, ...]
    columns: CandidateColumns
    """By tp, pp and dp."""
    num_microbatches: IntArray
    """Of a step on each replica, ``[V, C]``."""
    num_shards: IntArray
    """As ``Variant.num_shards``, ``[V, C]``."""

    @property
    def settings(self) -> tuple[BackboneSettings | None, ...]:
        """Those of each variant."""
        return tuple(each.settings for each in self.variants)

    def reducing(self, reduction: ReductionName) -> CandidateColumns:
        """Return the configurations if they reduce gradients so; a single replica has nothing to reduce."""
        reduces_each = self.columns.dp > 1 if reduction == "microbatch" else np.zeros(len(self.columns), dtype=bool)
        return replace(self.columns, reduces_each=reduces_each)


PeaksOf = Callable[[Alike, ReductionName, IntArray], IntArray]
"""Returns the predicted peak bytes on the fullest device, ``[N]``, at some places of variants that are alike."""


class PeakMemo:
    """Peaks of one request's configurations, each predicted at most once, for searches in different memory.

    ``found`` has what was searched, by the bytes of memory; ``shapes`` all configurations, whatever memory they take,
    by the number of chunks.
    """

    def __init__(self) -> None:
        self.shapes: dict[int, Shapes] = {}
        self.found: dict[int, Enumeration] = {}
        self._peaks: dict[tuple[tuple[BackboneSettings | None, ...], ReductionName], IntArray] = {}

    def fits(
        self, alike: Alike, reduction: ReductionName, which: BoolArray, memory_nbytes: int, peaks_of: PeaksOf
    ) -> tuple[BoolArray, int | None]:
        """Return what fits of some configurations, ``[V, C]``, and the least peak of those that do not.

        In a run of configurations (``_pivots``) none takes more than one with fewer replicas: so some of each run are
        predicted first, and then those between the last of these that does not fit and the next.
        """
        known = self._peaks.setdefault((alike.settings, reduction), np.full(which.size, _UNKNOWN))
        index = np.flatnonzero(which)

        def predict(places: IntArray) -> None:
            missing = places[known[places] == _UNKNOWN]
            if len(missing):
                known[missing] = peaks_of(alike, reduction, missing)

        pivot, before, after = _pivots(alike, index)
        predict(index[pivot])
        within = known[index] <= memory_nbytes  # true of those first ones alone
        between = within[after] & ~within[before]
        predict(index[between])
        fits = np.zeros(which.shape, dtype=bool)
        fits.reshape(-1)[index] = np.where(pivot | between, known[index] <= memory_nbytes, within[before])
        lacking = known[index[(pivot | between) & ~fits.reshape(-1)[index]]]
        return fits, int(lacking.min()) if len(lacking) else None


def _pivots(alike: Alike, index: IntArray) -> tuple[BoolArray, IntArray, IntArray]:
    """Return which of some places are predicted first, and for each the nearest of these before and after it.

    In a run of a variant's configurations, more replicas never take more memory. They differ in their number alone. A
    single replica, which shards nothing, is a run of its own. All of a run or none sum gradients over microbatches, and
    where ranks have several chunks, as many microbatches go through a chunk at once. A run's first and last are
    predicted first, and some at equal distances between them.
    """
    columns, num_microbatches = alike.columns, alike.num_microbatches.reshape(-1)[index]
    at_once = np.zeros_like(num_microbatches)
    if alike.variants[0].chunks > 1:
        pp = columns.pp[index % len(columns)]
        at_once = np.where(num_microbatches >= pp, largest_groups(pp, num_microbatches), 0)
    return _pivots_of_runs(index, columns.tp, columns.pp, columns.dp, num_microbatches, at_once)


@compiled
def _pivots_of_runs(
    index: IntArray, tp: IntArray, pp: IntArray, dp: IntArray, num_microbatches: IntArray, at_once: IntArray
) -> tuple[BoolArray, IntArray, IntArray]:
    """As ``_pivots``; tp, pp and dp: of each configuration of a variant, the rest of each place."""
    count = len(index)
    place, longest, last, first = np.zeros(count, dtype=np.int64), 1, -1, 0
    for at in range(count):
        while index[at] >= first + len(tp):  # the next variant
            first, last = first + len(tp), -1
        own = index[at] - first
        if last >= 0 and tp[own] == tp[last] and pp[own] == pp[last] and dp[last] != 1:
            is_summed = (num_microbatches[at] > 1) == (num_microbatches[at - 1] > 1)
            if is_summed and at_once[at] == at_once[at - 1]:
                place[at] = place[at - 1] + 1
                longest = max(longest, place[at] + 1)
        last = own
    step = int(np.sqrt(longest))
    pivot, before, after = np.zeros(count, dtype=np.bool_), np.empty_like(place), np.empty_like(place)
    for at in range(count):
        pivot[at] = place[at] % step == 0 or at + 1 == count or place[at + 1] == 0
        before[at] = at if pivot[at] else before[at - 1]
    for at in range(count - 1, -1, -1):
        after[at] = at if pivot[at] else after[at + 1]
    return pivot, before, after


def search_settings(
    variants: Sequence[Variant],
    shapes: Mapping[int, Shapes],
    memory_nbytes: int,
    reductions: Sequence[ReductionName],
    peaks_of: PeaksOf,
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
    memo = memo if memo is not None else PeakMemo()
    search = _Search(variants, shapes, memory_nbytes, reductions, peaks_of, memo)
    search.add([each for each in variants if each.word != "offload"])
    fits = bool(search.found)
    search.add([each for each in variants if each.word == "offload" and (not fits or each is variants[0])])
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
        peaks_of: PeaksOf,
        memo: PeakMemo,
    ) -> None:
        self._variants, self._shapes = variants, shapes
        self._memory_nbytes, self._reductions, self._peaks_of, self._memo = memory_nbytes, reductions, peaks_of, memo
        self._by_size: dict[tuple[int, str | None, str | None], dict[int, Variant]] = {}
        for each in variants:
            alike = self._by_size.setdefault((each.chunks, each.word, each.sharding), {})
            alike[each.microbatch_tokens] = each
        self._least_slowness: dict[tuple[object, ...], IntArray] = {}
        self._num_microbatches: dict[tuple[int, int], IntArray] = {}
        self._num_shards: dict[tuple[int, str | None], IntArray] = {}
        self.found: dict[BackboneSettings | None, CandidateColumns] = {}
        self.pruned: Counter[PruneReason] = Counter()
        self.least_peak: int | None = None

    def add(self, variants: Sequence[Variant]) -> None:
        """Add what fits of some variants and is not beaten; what recomputes less comes first, to beat the others."""
        groups: dict[tuple[int, str, int], list[Variant]] = {}
        for each in variants:
            groups.setdefault((SLOWNESS[each.word], str(each.word), each.chunks), []).append(each)
        for (_, _, chunks), group in sorted(groups.items()):
            together = max(1, _MOST_TOGETHER // max(1, len(self._shapes[chunks][0])))
            for start in range(0, len(group), together):
                self._add(self._alike(group[start : start + together]))

    def _alike(self, variants: Sequence[Variant]) -> Alike:
        columns = self._shapes[variants[0].chunks][0]
        counts = np.stack([self._microbatches_of(each) for each in variants])
        shards = np.stack([self._shards_of(each) for each in variants])
        return Alike(tuple(variants), columns, counts, shards)

    def _add(self, alike: Alike) -> None:
        kept = alike.num_shards > 0
        self.pruned[PruneReason.SHARDS] += int(kept.size - kept.sum())
        left = kept & ~np.stack([self._is_beaten(each) for each in alike.variants])
        self.pruned[PruneReason.SLOWER] += int(kept.sum() - left.sum())
        each, fits = np.zeros_like(left), np.zeros_like(left)
        for reduction in self._reductions:
            if reduction == "microbatch":
                each |= left & (alike.columns.dp > 1)
            within, least = self._memo.fits(alike, reduction, left, self._memory_nbytes, self._peaks_of)
            fits |= within
            if reduction == self._reductions[0]:
                for variant, of_variant in zip(alike.variants, within, strict=True):
                    slowness = self._slowness_of(variant)
                    slowness[of_variant] = np.minimum(slowness[of_variant], SLOWNESS[variant.word])
            if least is not None:
                self.least_peak = least if self.least_peak is None else min(self.least_peak, least)
            left = left & ~within
        self.pruned[PruneReason.MEMORY] += int(left.sum())
        for variant, of_variant, reduces_each in zip(alike.variants, fits, each, strict=True):
            if of_variant.any():
                columns = replace(alike.columns, reduces_each=reduces_each, settings=variant.settings)
                self.found[variant.settings] = columns[of_variant]

    def _slowness_of(self, variant: Variant) -> IntArray:
        """The least of ``SLOWNESS`` that fits so far, with all else as in the variant, ``[C]``."""
        key = variant.microbatch_tokens, variant.chunks, variant.sharding
        if key not in self._least_slowness:
            self._least_slowness[key] = np.full(len(self._shapes[variant.chunks][0]), len(SLOWNESS))
        return self._least_slowness[key]

    def _microbatches_of(self, variant: Variant) -> IntArray:
        key = variant.chunks, variant.microbatch_tokens
        if key not in self._num_microbatches:
            self._num_microbatches[key] = variant.num_microbatches(self._shapes[variant.chunks][0].dp)
        return self._num_microbatches[key]

    def _shards_of(self, variant: Variant) -> IntArray:
        key = variant.chunks, variant.sharding
        if key not in self._num_shards:
            self._num_shards[key] = variant.num_shards(self._shapes[variant.chunks][0])
        return self._num_shards[key]

    def _is_beaten(self, variant: Variant) -> BoolArray:
        slowness = self._slowness_of(variant)
        if variant is self._variants[0]:
            return np.zeros(len(slowness), dtype=bool)
        beaten: BoolArray = slowness < SLOWNESS[variant.word]
        if variant.sharding == "hybrid" and variant.microbatch_tokens in self._sizes(variant, "full"):
            beaten |= self._shards_of(variant) == self._shapes[variant.chunks][0].dp
        sizes = self._sizes(variant, variant.sharding)
        smaller = [tokens for tokens in sizes if tokens < variant.microbatch_tokens]
        if smaller:
            beaten |= self._microbatches_of(sizes[max(smaller)]) == self._microbatches_of(variant)
        return beaten

    def _sizes(self, variant: Variant, sharding: str | None) -> Mapping[int, Variant]:
        """Variants that differ by the size of microbatches alone, with this sharding, by that size."""
        return self._by_size.get((variant.chunks, variant.word, sharding), {})
