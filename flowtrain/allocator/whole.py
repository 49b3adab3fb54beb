"""Candidates in which encoders and backbone use the same devices, and those of a backbone alone: the best by formula.

All use one type of devices. ``colocated``: an encoder actor on each device of the backbone. ``monolithic``: encoder
layers inside the backbone's ranks. ``llm_only``: no vision.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from flowtrain.allocator import monolithic
from flowtrain.allocator.allocate import WORTH_RATING
from flowtrain.allocator.candidates import Candidate, CandidateColumns
from flowtrain.allocator.degrees import encoder_degree_faults
from flowtrain.allocator.mode_candidate import ModeCandidate
from flowtrain.allocator.request import Memos, Request, SurrogateFactory, enumerate_module, memos_of
from flowtrain.allocator.surrogate import BACKBONE, Surrogate
from flowtrain.costs.cluster import DeviceType
from flowtrain.costs.flops import FloatArray, IntArray
from flowtrain.costs.profile_together import ASSUMED_INTERFERENCE
from flowtrain.types.plan import Degrees
from flowtrain.types.run_plan import Mode

NUM_BEST = 20
"""Candidates of a mode that are rated again by drawn batches."""
_MOST_OF_DEGREES = 3
"""Candidates with the same degrees that are rated again."""
_MOST_OF_SIZE = 5
"""Candidates with replicas of the same size that are rated again, while there are others."""
_MOST_CHECKED = 200
"""Candidates of ``monolithic`` whose memory is predicted, fastest first; there are as many as that only if few fit."""
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Found:
    """The best candidates of one mode."""

    candidates: tuple[ModeCandidate, ...]
    """Fastest by formula first."""
    lacking: str = ""
    """Why there are none, in words."""


def whole_candidates(
    request: Request, surrogate_for: SurrogateFactory, mode: Mode, memos: Memos | None = None, most: int = NUM_BEST
) -> Found:
    """Return the best candidates of ``colocated``, ``monolithic`` or ``llm_only`` over all of the request's choices.

    memos: of other enumerations of the request.
    """
    memos = memos if memos is not None else memos_of(request)
    found: list[ModeCandidate] = []
    lacking = []
    for device_type in request.cluster.device_types:
        if not device_type.count:
            continue
        each = _SEARCHES[mode](request, surrogate_for, device_type, memos, most)
        found += each.candidates
        lacking.append(each.lacking)
    found.sort(key=_by_rate)
    found = [each for each in found if each.rate_formula >= WORTH_RATING * found[0].rate_formula]
    return Found(tuple(_varied(found, most)), "; ".join(filter(None, lacking)) if not found else "")


def _varied(candidates: Sequence[ModeCandidate], most: int) -> list[ModeCandidate]:
    """Limit what is alike among the best: few large replicas pack more evenly than many small ones."""
    alike: Counter[object] = Counter()
    first, rest = [], []
    for each in candidates:
        degrees, name = each.backbone.degrees, each.backbone.device_type
        alike[name, degrees] += 1
        alike[name, degrees.replica_size] += 1
        if alike[name, degrees] <= _MOST_OF_DEGREES:
            (first if alike[name, degrees.replica_size] <= _MOST_OF_SIZE else rest).append(each)
    return sorted([*first, *rest][:most], key=_by_rate)


def _by_rate(candidate: ModeCandidate) -> tuple[float, int]:
    return -candidate.rate_formula, candidate.devices


def slowdown_of(request: Request, surrogate: Surrogate, device_type: str) -> tuple[float, bool]:
    """Return the time of encoders and backbone at once over the sum of both alone, and whether it was measured."""
    measured = [surrogate.times[device_type].slowdown(name) for name in request.model.encoders]
    known = [each for each in measured if each is not None]
    return (max(known), True) if len(known) == len(measured) and known else (ASSUMED_INTERFERENCE, False)


def _colocated(
    request: Request, surrogate_for: SurrogateFactory, device_type: DeviceType, memos: Memos, most: int
) -> Found:
    names = (*request.model.encoders, BACKBONE)
    memory = min(request.memory_nbytes(name, device_type.name) for name in names)
    lacking = ""
    for tp in _encoder_degrees(request, device_type):
        encoders = {name: Candidate(name, device_type.name, Degrees(tp=tp)) for name in request.model.encoders}
        taken = sum(map(request.peak_nbytes, encoders.values()))
        enumeration = enumerate_module(request, BACKBONE, device_type, memory - taken, memos)
        found = [
            each
            for columns in enumeration.every
            for each in _best_colocated(request, surrogate_for, columns[columns.tp % tp == 0], tp, most)
        ]
        if found:
            return Found(tuple(found))
        least = enumeration.least_peak_nbytes
        if least is not None and not lacking:
            lacking = _too_little(device_type, taken + least, memory)
    return Found((), lacking or f"no degrees of the backbone on {device_type.count} {device_type.name}")


def _encoder_degrees(request: Request, device_type: DeviceType) -> Iterator[int]:
    """Tensor parallel degrees of encoders, the best first: larger ones only save memory."""
    for tp in range(1, device_type.devices_per_node + 1):
        faults = [
            name
            for name, spec in request.model.encoders.items()
            if tp > 1
            and (name in request.whole or encoder_degree_faults(name, tp, spec) or spec.intermediate_size % tp)
        ]
        if device_type.devices_per_node % tp == 0 and not faults:
            yield tp


def _best_colocated(
    request: Request, surrogate_for: SurrogateFactory, columns: CandidateColumns, encoder_tp: int, most: int
) -> Iterator[ModeCandidate]:
    if not len(columns):
        return
    at = request if columns.settings is None else request.with_settings(columns.settings)
    surrogate, batch = surrogate_for(at), at.workload.global_batch_size
    times, step = surrogate.times[columns.device_type], surrogate.step_times(columns)
    encoding = sum(float(times.images_s(name, encoder_tp).mean()) for name in at.model.encoders) * batch * encoder_tp
    slowdown, _ = slowdown_of(at, surrogate, columns.device_type)
    seconds = np.maximum(step.total, slowdown * (surrogate.busy_s(columns, step) + encoding / columns.devices))
    for index in _fastest(columns, seconds, most):
        backbone = columns.candidate(index, batch / float(step.total[index]))
        dp = backbone.devices // encoder_tp
        encoders = {
            name: Candidate(
                name, columns.device_type, Degrees(dp, 1, encoder_tp), dp / times.sample_s(name, encoder_tp)
            )
            for name in at.model.encoders
        }
        rate = batch / float(seconds[index])
        yield ModeCandidate(
            "colocated", backbone, encoders, columns.settings, rate_formula=rate, devices=backbone.devices
        )


def _llm_only(
    request: Request, surrogate_for: SurrogateFactory, device_type: DeviceType, memos: Memos, most: int
) -> Found:
    enumeration = enumerate_module(request, BACKBONE, device_type, memos=memos)
    found = []
    for columns in filter(len, enumeration.every):
        at = request if columns.settings is None else request.with_settings(columns.settings)
        seconds = surrogate_for(at).step_times(columns).total
        for index in _fastest(columns, seconds, most):
            rate = at.workload.global_batch_size / float(seconds[index])
            backbone = columns.candidate(index, rate)
            found.append(
                ModeCandidate(
                    "llm_only", backbone, settings=columns.settings, rate_formula=rate, devices=backbone.devices
                )
            )
    least = enumeration.least_peak_nbytes
    memory = request.memory_nbytes(BACKBONE, device_type.name)
    return Found(tuple(found), "" if found or least is None else _too_little(device_type, least, memory))


def _monolithic(
    request: Request, surrogate_for: SurrogateFactory, device_type: DeviceType, memos: Memos, most: int
) -> Found:
    search = _MonolithicSearch(request, surrogate_for, device_type, memos)
    found = tuple(search.best(most))
    memory = request.memory_nbytes(BACKBONE, device_type.name)
    if found or search.least_peak is None:
        return Found(found, f"no degrees of the ranks on {device_type.count} {device_type.name}")
    return Found((), _too_little(device_type, search.least_peak, memory))


class _MonolithicSearch:
    """Best first: a group of configurations has a bound on its rate; its rates and then its memory follow lazily."""

    def __init__(
        self, request: Request, surrogate_for: SurrogateFactory, device_type: DeviceType, memos: Memos
    ) -> None:
        self._request, self._surrogate_for, self._type = request, surrogate_for, device_type
        self._memory_nbytes = request.memory_nbytes(BACKBONE, device_type.name)
        self._queue: list[tuple[float, int, Any]] = []
        self._order = count()
        self.least_peak: int | None = None
        added = monolithic.added_nbytes(request.decided())
        # Ranks of a pipeline share the encoder, so they may have more room than one that has it whole.
        for room in (self._memory_nbytes - added, self._memory_nbytes - added // 4):
            enumeration = enumerate_module(request, BACKBONE, device_type, room, memos)
            for columns in filter(len, enumeration.every):
                self._add(columns)
            if enumeration.least_peak_nbytes is not None:
                self.least_peak = enumeration.least_peak_nbytes + added

    def best(self, most: int) -> Iterator[ModeCandidate]:
        """Yield the fastest that fit."""
        seen, same, num_found, num_checked, least = set(), Counter[object](), 0, 0, 0.0
        while self._queue and num_found < most and num_checked < _MOST_CHECKED:
            negative, _, entry = heapq.heappop(self._queue)
            if -negative < least:
                return
            if not isinstance(entry, ModeCandidate):
                columns, group = entry
                if same[int(columns.pp[group[0]] * columns.tp[group[0]])] < _MOST_OF_SIZE:
                    self._expand(columns, group)
                continue
            key = replace(entry.backbone, rate=0.0), entry.encoder_layers
            degrees = entry.backbone.degrees
            if key in seen or same[degrees] == _MOST_OF_DEGREES or same[degrees.replica_size] == _MOST_OF_SIZE:
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
                yield replace(entry, peak_nbytes=peak)
            elif self.least_peak is None or peak < self.least_peak:
                self.least_peak = peak

    def _at(self, columns: CandidateColumns) -> tuple[Request, Surrogate]:
        at = self._request if columns.settings is None else self._request.with_settings(columns.settings)
        return at, self._surrogate_for(at)

    def _add(self, columns: CandidateColumns) -> None:
        at, surrogate = self._at(columns)
        tps = [tp for tp in np.unique(columns.tp).tolist() if monolithic.splits_encoder(at, tp)]
        columns = columns[np.isin(columns.tp, tps)]
        if not len(columns):
            return
        bounds = at.workload.global_batch_size / monolithic.least_step_s(at, surrogate, columns)
        for group in monolithic.groups(columns):
            self._push(float(bounds[group].max()), (columns, group))

    def _expand(self, columns: CandidateColumns, group: Any) -> None:
        columns = columns[group]
        at, surrogate = self._at(columns)
        batch = at.workload.global_batch_size
        for place in monolithic.places(at, int(columns.pp[0])):
            seconds = monolithic.step_s(at, surrogate, columns, place)
            for index in _fastest(columns, seconds, NUM_BEST):
                rate = batch / float(seconds[index])
                backbone = columns.candidate(index, rate)
                self._push(
                    rate, ModeCandidate("monolithic", backbone, {}, columns.settings, place, rate, backbone.devices)
                )

    def _push(self, rate: float, entry: Any) -> None:
        heapq.heappush(self._queue, (-rate, next(self._order), entry))


def _fastest(columns: CandidateColumns, seconds: FloatArray, most: int) -> list[int]:
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


def _too_little(device_type: DeviceType, needed: int, memory: int) -> str:
    return f"a {device_type.name} needs at least {needed / _GIB:.1f} GiB of {memory / _GIB:.1f}"


_SEARCHES = {"colocated": _colocated, "monolithic": _monolithic, "llm_only": _llm_only}
