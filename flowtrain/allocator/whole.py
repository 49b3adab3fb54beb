"""Candidates in which encoders and backbone use the same devices, and those of a backbone alone: the best by formula.

All use one type of devices. ``colocated``: an encoder actor on each device of the backbone. ``monolithic``: encoder
layers inside the backbone's ranks. ``llm_only``: no vision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from flowtrain.allocator.allocate import WORTH_RATING
from flowtrain.allocator.candidates import Candidate, CandidateColumns
from flowtrain.allocator.degrees import encoder_degree_faults
from flowtrain.allocator.mode_candidate import ModeCandidate
from flowtrain.allocator.monolithic_search import MOST_OF_DEGREES, MOST_OF_SIZE, NUM_BEST, MonolithicSearch, fastest
from flowtrain.allocator.request import Memos, Request, SurrogateFactory, enumerate_module, memos_of
from flowtrain.allocator.surrogate import BACKBONE, Surrogate
from flowtrain.costs.cluster import DeviceType
from flowtrain.costs.profile_together import ASSUMED_INTERFERENCE, encoding_adds_s
from flowtrain.types.plan import Degrees
from flowtrain.types.run_plan import Mode

_MOST_OF_SETTINGS = 10
"""Candidates with the same settings that are compared with others."""
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Found:
    """The best candidates of one mode."""

    candidates: tuple[ModeCandidate, ...]
    """Fastest by formula first."""
    lacking: str = ""
    """Why there are none, in words."""


def whole_candidates(
    request: Request, surrogate_for: SurrogateFactory, mode: Mode, memos: Memos | None = None
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
        each = _SEARCHES[mode](request, surrogate_for, device_type, memos)
        found += each.candidates
        lacking.append(each.lacking)
    found.sort(key=_by_rate)
    found = [each for each in found if each.rate_formula >= WORTH_RATING * found[0].rate_formula]
    return Found(tuple(_varied(found)), "; ".join(filter(None, lacking)) if not found else "")


def _varied(candidates: Sequence[ModeCandidate]) -> list[ModeCandidate]:
    """Limit what is alike among the best: few large replicas pack more evenly than many small ones."""
    alike: Counter[object] = Counter()
    first: list[ModeCandidate] = []
    rest: list[ModeCandidate] = []
    for each in candidates:
        degrees, name = each.backbone.degrees, each.backbone.device_type
        alike[name, degrees] += 1
        alike[name, degrees.replica_size] += 1
        if alike[name, degrees] <= MOST_OF_DEGREES:
            (first if alike[name, degrees.replica_size] <= MOST_OF_SIZE else rest).append(each)
    return sorted([*first, *rest][:NUM_BEST], key=_by_rate)


def _by_rate(candidate: ModeCandidate) -> tuple[float, int]:
    return -candidate.rate_formula, candidate.devices


def slowdown_of(request: Request, surrogate: Surrogate, device_type: str) -> tuple[float, bool]:
    """Return the time of encoders and backbone at once over the sum of both alone, and whether it was measured."""
    measured = [surrogate.times[device_type].slowdown(name) for name in request.model.encoders]
    known = [each for each in measured if each is not None]
    return (max(known), True) if len(known) == len(measured) and known else (ASSUMED_INTERFERENCE, False)


def _colocated(request: Request, surrogate_for: SurrogateFactory, device_type: DeviceType, memos: Memos) -> Found:
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
            for each in _best_colocated(request, surrogate_for, columns[columns.tp % tp == 0], tp)
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
    request: Request, surrogate_for: SurrogateFactory, columns: CandidateColumns, encoder_tp: int
) -> Iterator[ModeCandidate]:
    if not len(columns):
        return
    at = request if columns.settings is None else request.with_settings(columns.settings)
    surrogate, batch = surrogate_for(at), at.workload.global_batch_size
    times, step = surrogate.times[columns.device_type], surrogate.step_times(columns)
    encoding = sum(float(times.images_s(name, encoder_tp).mean()) for name in at.model.encoders) * batch * encoder_tp
    sample_s = {name: times.sample_s(name, encoder_tp) for name in at.model.encoders}
    slowdown, _ = slowdown_of(at, surrogate, columns.device_type)
    work = surrogate.busy_s(columns, step)
    encode = np.full(len(columns), encoding) / columns.devices
    seconds = np.maximum(step.total, work + encoding_adds_s(encode, work, slowdown))
    for index in fastest(columns, seconds, _MOST_OF_SETTINGS):
        backbone = columns.candidate(index, batch / float(step.total[index]))
        dp = backbone.devices // encoder_tp
        encoders = {
            name: Candidate(name, columns.device_type, Degrees(dp, 1, encoder_tp), dp / seconds_of_one)
            for name, seconds_of_one in sample_s.items()
        }
        rate = batch / float(seconds[index])
        yield ModeCandidate(
            "colocated", backbone, encoders, columns.settings, rate_formula=rate, devices=backbone.devices
        )


def _llm_only(request: Request, surrogate_for: SurrogateFactory, device_type: DeviceType, memos: Memos) -> Found:
    enumeration = enumerate_module(request, BACKBONE, device_type, memos=memos)
    found, best = [], 0.0
    for columns in filter(len, enumeration.every):
        at = request if columns.settings is None else request.with_settings(columns.settings)
        seconds = surrogate_for(at).step_times(columns).total
        best = max(best, at.workload.global_batch_size / float(seconds.min()))
        for index in fastest(columns, seconds, _MOST_OF_SETTINGS):
            rate = at.workload.global_batch_size / float(seconds[index])
            if rate < WORTH_RATING * best:
                continue
            backbone = columns.candidate(index, rate)
            found.append(
                ModeCandidate(
                    "llm_only", backbone, settings=columns.settings, rate_formula=rate, devices=backbone.devices
                )
            )
    least = enumeration.least_peak_nbytes
    memory = request.memory_nbytes(BACKBONE, device_type.name)
    return Found(tuple(found), "" if found or least is None else _too_little(device_type, least, memory))


def _monolithic(request: Request, surrogate_for: SurrogateFactory, device_type: DeviceType, memos: Memos) -> Found:
    search = MonolithicSearch(request, surrogate_for, device_type, memos)
    found = tuple(search.best())
    memory = request.memory_nbytes(BACKBONE, device_type.name)
    if found:
        return Found(found)
    if search.least_peak is None:
        return Found((), f"no degrees of the ranks on {device_type.count} {device_type.name}")
    return Found((), _too_little(device_type, search.least_peak, memory))


def _too_little(device_type: DeviceType, needed: int, memory: int) -> str:
    return f"a {device_type.name} needs at least {needed / _GIB:.1f} GiB of {memory / _GIB:.1f}"


_SEARCHES = {"colocated": _colocated, "monolithic": _monolithic, "llm_only": _llm_only}
