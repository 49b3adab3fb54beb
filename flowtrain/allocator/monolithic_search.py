"""The best candidates of ``monolithic`` by formula, whose memory is predicted one by one."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count

import numpy as np

from flowtrain.allocator import monolithic
from flowtrain.allocator.allocate import WORTH_RATING
from flowtrain.allocator.candidates import BoolArray, CandidateColumns
from flowtrain.allocator.mode_candidate import ModeCandidate
from flowtrain.allocator.request import Memos, Request, SurrogateFactory, enumerate_module
from flowtrain.allocator.settings_search import SLOWNESS
from flowtrain.allocator.surrogate import BACKBONE, Surrogate
from flowtrain.costs.cluster import DeviceType
from flowtrain.costs.flops import FloatArray, IntArray
from flowtrain.types.run_plan import BackboneSettings

NUM_BEST = 20
"""Candidates of a mode that are rated again by drawn batches."""
MOST_OF_DEGREES = 3
"""Candidates with the same degrees that are rated again."""
MOST_OF_SIZE = 5
"""Candidates with replicas of the same size that are rated again, while there are others."""
_MOST_EXPANDED = 250
"""Groups of configurations with the same degrees of a replica whose rates are predicted, by the highest bound."""
_MOST_CHECKED = 200
"""Candidates of ``monolithic`` whose memory is predicted, fastest first; there are as many as that only if few fit."""


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Configurations with the same settings, pp and tp."""

    columns: CandidateColumns
    """All with these settings, ``[C]``."""
    parts: monolithic.PartTimes
    fits: BoolArray
    """Whether each one fits an amount of memory, ``[rooms, C]``."""
    members: IntArray
    """Which of all are in the group."""

    @property
    def replica_size(self) -> int:
        """Ranks of a replica."""
        return int(self.columns.pp[self.members[0]] * self.columns.tp[self.members[0]])


class MonolithicSearch:
    """Best first: a group of configurations has a bound on its rate; its rates and then its memory follow lazily."""

    def __init__(
        self, request: Request, surrogate_for: SurrogateFactory, device_type: DeviceType, memos: Memos
    ) -> None:
        self._request, self._surrogate_for = request, surrogate_for
        self._memory_nbytes = request.memory_nbytes(BACKBONE, device_type.name)
        self._queue: list[tuple[float, int, _Group | ModeCandidate]] = []
        self._order = count()
        self.least_peak: int | None = None
        added = monolithic.added_nbytes(request.decided())
        # Ranks of a pipeline share the encoder, so they may have more room than one that has it whole; all ranks share
        # the gradients and states of a trained one.
        least = 0 if monolithic.is_trained(request) else added // 4
        rooms = dict.fromkeys(self._memory_nbytes - each for each in (added, added // 4, least))
        fitting: defaultdict[BackboneSettings | None, list[CandidateColumns]] = defaultdict(list)
        for room in rooms:
            enumeration = enumerate_module(request, BACKBONE, device_type, room, memos)
            for columns in filter(len, enumeration.every):
                fitting[columns.settings].append(columns)
            if enumeration.least_peak_nbytes is not None:
                self.least_peak = enumeration.least_peak_nbytes + added
        for every in fitting.values():
            self._add(every)

    def best(self) -> Iterator[ModeCandidate]:
        """Yield the fastest that fit."""
        seen, same, least = set(), Counter[object](), 0.0
        num_found = num_checked = num_expanded = 0
        while self._queue and num_found < NUM_BEST and num_checked < _MOST_CHECKED:
            negative, _, entry = heapq.heappop(self._queue)
            if -negative < least:
                return
            if isinstance(entry, _Group):
                if same[entry.replica_size] < MOST_OF_SIZE and num_expanded < _MOST_EXPANDED:
                    num_expanded += 1
                    self._expand(entry)
                continue
            key = replace(entry.backbone, rate=0.0), entry.encoder_layers
            degrees = entry.backbone.degrees
            if key in seen or same[degrees] == MOST_OF_DEGREES or same[degrees.replica_size] == MOST_OF_SIZE:
                continue
            seen.add(key)
            num_checked += 1
            assert entry.encoder_layers is not None
            peak = monolithic.memory(self._request.of(entry.backbone), entry.backbone, entry.encoder_layers).peak
            if peak <= self._memory_nbytes:
                num_found += 1
                same[degrees] += 1
                same[degrees.replica_size] += 1
                least = max(least, WORTH_RATING * -negative)
                yield entry
                continue
            self.least_peak = peak if self.least_peak is None else min(peak, self.least_peak)
            for leaner in self._leaner(entry):
                self._push(leaner.rate_formula, leaner)

    def _at(self, columns: CandidateColumns) -> tuple[Request, Surrogate]:
        at = self._request if columns.settings is None else self._request.with_settings(columns.settings)
        return at, self._surrogate_for(at)

    def _add(self, rooms: Sequence[CandidateColumns]) -> None:
        """Add what fits with some settings; rooms: for different amounts of memory, so most are in several."""
        at, surrogate = self._at(rooms[0])
        columns, fits = _merged(rooms)
        tps = [tp for tp in columns.tps if monolithic.splits_encoder(at, tp)]
        splits = np.isin(columns.tp, tps)
        columns, fits = columns[splits], fits[:, splits]
        if not len(columns):
            return
        parts = monolithic.PartTimes.of(at, surrogate, columns)
        bounds = at.workload.global_batch_size / monolithic.least_step_s(at, columns, parts)
        for group in monolithic.groups(columns):
            self._push(float(bounds[group].max()), _Group(columns, parts, fits, group))

    def _expand(self, group: _Group) -> None:
        columns, parts = group.columns[group.members], group.parts[group.members]
        at, surrogate = self._at(columns)
        batch = at.workload.global_batch_size
        places = monolithic.places(at, int(columns.pp[0]))
        if not places:  # no partition has so many ranks
            return
        rooms = [np.flatnonzero(each) for each in group.fits[:, group.members]]
        for place, seconds in zip(places, monolithic.steps_s(at, surrogate, columns, places, parts), strict=True):
            best = [_first(columns, seconds, each, MOST_OF_SIZE) for each in rooms]
            for index in dict.fromkeys(chain.from_iterable(best)):
                rate = batch / float(seconds[index])
                backbone = columns.candidate(index, rate)
                self._push(
                    rate, ModeCandidate("monolithic", backbone, {}, columns.settings, place, rate, backbone.devices)
                )

    def _leaner(self, entry: ModeCandidate) -> Iterator[ModeCandidate]:
        """Yield what takes less memory with the same degrees; the enumeration left it out, as it has no encoder."""
        backbone, settings = entry.backbone, entry.settings
        assert entry.encoder_layers is not None
        leaner = [replace(backbone, settings=each) for each in self._recomputing_more(settings)]
        if self._request.chooses_reduction and backbone.degrees.dp > 1:
            leaner.append(replace(backbone, gradient_reduction="microbatch"))
        for each in leaner:
            columns = CandidateColumns.of(each)
            at, surrogate = self._at(columns)
            seconds = float(monolithic.step_s(at, surrogate, columns, entry.encoder_layers)[0])
            rate = at.workload.global_batch_size / seconds
            yield replace(entry, backbone=replace(each, rate=rate), settings=each.settings, rate_formula=rate)

    def _recomputing_more(self, settings: BackboneSettings | None) -> Iterator[BackboneSettings]:
        """Yield the choices that differ from some by more recomputation alone."""
        if settings is None:
            return
        for each in self._request.choices:
            word = each.activation_checkpointing
            is_more = SLOWNESS[word] > SLOWNESS[settings.activation_checkpointing] and word != "offload"
            if is_more and replace(settings, activation_checkpointing=word) == each:
                yield each

    def _push(self, rate: float, entry: _Group | ModeCandidate) -> None:
        heapq.heappush(self._queue, (-rate, next(self._order), entry))


def _merged(every: Sequence[CandidateColumns]) -> tuple[CandidateColumns, BoolArray]:
    """Return different configurations with the same settings, and which of ``every`` has each, ``[len(every), C]``."""
    columns = [np.stack([each.tp, each.pp, each.dp, _reduces(each)]) for each in every]
    bases = np.max([each.max(axis=1) for each in columns], axis=0) + 1
    numbers = [np.ravel_multi_index(tuple(each), tuple(bases)) for each in columns]
    every_number = np.sort(np.concatenate(numbers), kind="stable")  # runs that are sorted: merged in linear time
    different = every_number[np.diff(every_number, prepend=-1) > 0]
    tp, pp, dp, reduces = np.unravel_index(different, tuple(bases))
    merged = replace(every[0], tp=tp, pp=pp, dp=dp, reduces_each=reduces > 0)
    has = np.zeros((len(every), len(different)), dtype=bool)
    for mine, each in zip(has, numbers, strict=True):
        mine[np.searchsorted(different, each)] = True
    return merged, has


def _reduces(columns: CandidateColumns) -> BoolArray:
    return np.zeros(len(columns), dtype=bool) if columns.reduces_each is None else columns.reduces_each


def fastest(columns: CandidateColumns, seconds: FloatArray, most: int) -> list[int]:
    """Indices of the fastest, and of the fastest of each (tp, pp) that is not far slower; at most twice ``most``.

    Ties: the fewest devices, then the smallest pp.
    """
    order = _first(columns, seconds, np.arange(len(seconds)), most)
    starts = np.flatnonzero(np.diff(columns.tp, prepend=-1) | np.diff(columns.pp, prepend=-1))
    runs = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(seconds)))
    best = np.minimum.reduceat(seconds, starts)[runs]
    of_shapes = np.flatnonzero((seconds <= best) & (seconds * WORTH_RATING <= seconds.min()))
    return list(dict.fromkeys([*order, *_first(columns, seconds, of_shapes, most)]))


def _first(columns: CandidateColumns, seconds: FloatArray, index: IntArray, most: int) -> list[int]:
    """The fastest of some."""
    if len(index) > most:
        index = index[seconds[index] <= np.partition(seconds[index], most - 1)[most - 1]]
    order = np.lexsort((columns.pp[index], columns.devices[index], seconds[index]))[:most]
    found: list[int] = index[order].tolist()
    return found
