"""All modes under one memory and rate model: the best plan of each, the fastest first, and why the others lost."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from flowtrain.allocator.allocate import allocate
from flowtrain.allocator.allocation import Allocation
from flowtrain.allocator.drawn import DrawnRate, DrawnWork, rate_of
from flowtrain.allocator.drawn_batches import DrawnBatches
from flowtrain.allocator.mode_candidate import ModeCandidate
from flowtrain.allocator.mode_modules import modules_of
from flowtrain.allocator.mode_rating import ModeComparison, ModeRating
from flowtrain.allocator.mode_reasons import (
    AS_FAST,
    CANNOT_RUN,
    Contestant,
    place,
    simplicity,
    why_bound,
    why_lost,
    why_won,
)
from flowtrain.allocator.program.flow import Choice
from flowtrain.allocator.program.solvers import Solver
from flowtrain.allocator.request import Memos, Request, SurrogateFactory, memos_of
from flowtrain.allocator.simulated import DeviceTimesOf, SimulatedWork, simulated_run, simulated_work
from flowtrain.allocator.surrogate import Surrogate
from flowtrain.allocator.whole import Found, slowdown_of, whole_candidates
from flowtrain.config.allocator import AllocationMethod
from flowtrain.costs.profile_trials import Trial, corrected_rate, was_tried
from flowtrain.errors import ConfigError
from flowtrain.types.run_plan import Mode

_EQUAL = 0.999
"""Of a mode's candidates with this share of its best rate, the one with the fewest devices is taken."""
_NEARLY, _MOST_SIMULATED = 0.9, 4
"""Share of a mode's best rate by drawn batches that a candidate needs to be simulated, and how many are at most."""
_APART: tuple[Mode, ...] = ("decoupled", "disaggregated")
"""Encoders and backbone have devices of their own."""


def compare_modes(
    request: Request,
    surrogate_for: SurrogateFactory,
    solver: Solver | None,
    modes: Sequence[Mode],
    *,
    method: AllocationMethod = "milp",
    batches: DrawnBatches | None = None,
    trials: Sequence[Trial] = (),
    may_be_tried: bool = False,
    times_of: DeviceTimesOf | None = None,
) -> ModeComparison:
    """Return the best plan of each mode over all of the request's choices.

    method: of ``decoupled`` and ``disaggregated``. batches: drawn from the workload; None: by a fixed seed.
    times_of: of single actions, by which the fastest candidates of a mode are simulated; None: none is.
    trials: plans that ran, by which predicted rates are corrected. may_be_tried: others may still run
    (``costs.profile_trials.corrected_rate``). ``llm_only`` is a bound, not a contestant, unless it
    is the only mode. Raises ConfigError if no mode fits.
    """
    started = time.perf_counter()
    batches = batches if batches is not None else DrawnBatches.draw(request.decided().workload)
    search = _Search(request, surrogate_for, batches, memos_of(request), trials, may_be_tried, times_of)
    search.allocate(solver, modes, method)
    found = {mode: search.best(mode) for mode in modes}
    if all(isinstance(found[mode], str) for mode in _contestants(modes)):
        raise search.refusal({mode: each for mode, each in found.items() if isinstance(each, str)})
    ratings = tuple(_ratings(request, surrogate_for, search.allocation, modes, found))
    return ModeComparison(ratings, search.allocation, time.perf_counter() - started)


def _ratings(
    request: Request,
    surrogate_for: SurrogateFactory,
    allocation: Allocation | None,
    modes: Sequence[Mode],
    found: dict[Mode, Contestant | str],
) -> Iterator[ModeRating]:
    """The winner, the others by rate, the bound, those that do not fit."""
    fitting = [each for each in found.values() if isinstance(each, Contestant)]
    rivals = [each for each in fitting if each.mode in _contestants(found)]
    best = max(each.rate for each in rivals)
    winner = min((each for each in rivals if each.rate >= AS_FAST * best), key=lambda each: simplicity(each.mode))
    order = sorted(rivals, key=lambda each: place(each.mode, each.rate))
    others = [each for each in order if each is not winner]
    bound = [each for each in fitting if each not in rivals]
    reasons = [
        why_won(winner, others, is_alone=len(modes) == 1),
        *(why_lost(each, winner) for each in others),
        *(map(why_bound, bound)),
    ]
    for each, reason in zip((winner, *others, *bound), reasons, strict=True):
        candidate = each.candidate
        shared = candidate.mode in _APART and allocation is not None and allocation.shared
        yield ModeRating(
            mode=candidate.mode,
            rate=each.rate,
            reason=reason,
            modules=allocation.modules
            if shared and allocation is not None
            else modules_of(request, surrogate_for, candidate, each.rate, each.starved),
            devices=candidate.devices,
            settings=candidate.settings,
            encoder_layers=candidate.encoder_layers,
            rate_formula=candidate.rate_formula,
            imbalance=each.imbalance,
            predicted=each.predicted,
            candidate=candidate,
            was_tried=each.was_tried,
        )
    yield from (ModeRating(mode, None, reason) for mode, reason in found.items() if isinstance(reason, str))


def as_run(candidate: ModeCandidate, allocation: Allocation | None) -> ModeCandidate:
    """Return the candidate; on an only device both sides share it, as each one does in mode colocated."""
    shared = candidate.mode in _APART and allocation is not None and allocation.shared
    return replace(candidate, mode="colocated") if shared else candidate


def _contestants(modes: Collection[Mode]) -> Collection[Mode]:
    """The modes that may win."""
    return [mode for mode in modes if mode != "llm_only"] or modes


@dataclass(slots=True)
class _Search:
    """Finds and rates the candidates of each mode."""

    request: Request
    surrogate_for: SurrogateFactory
    batches: DrawnBatches
    memos: Memos
    trials: Sequence[Trial] = ()
    may_be_tried: bool = False
    times_of: DeviceTimesOf | None = None
    allocation: Allocation | None = None
    refused: ConfigError | None = None
    """Why there is no allocation."""
    drawn: dict[object, DrawnWork] = field(default_factory=dict)
    simulated: dict[object, SimulatedWork] = field(default_factory=dict)
    """Work by ``_work_key``: ``decoupled`` and ``disaggregated`` do the same, at other times."""

    def allocate(self, solver: Solver | None, modes: Sequence[Mode], method: AllocationMethod) -> None:
        """Solve Eq. 2 if a mode needs it."""
        if not any(mode in _APART and not self._impossible(mode) for mode in modes):
            return
        try:
            self.allocation = allocate(self.request, self.surrogate_for, solver, method, self.memos)
        except ConfigError as error:
            self.refused = error

    def best(self, mode: Mode) -> Contestant | str:
        """Return the fastest candidate of a mode by drawn batches, or why there is none."""
        if reason := self._impossible(mode):
            return reason
        if mode in _APART:
            found = self._apart(mode)
        else:
            found = whole_candidates(self.request, self.surrogate_for, mode, self.memos)
        rated = self._rated(found.candidates)
        if not rated:
            return f"does not fit: {found.lacking}"
        best = max(each.rate for each in rated)
        if not best:
            return "its trial failed"
        return min(
            (each for each in rated if each.rate >= _EQUAL * best),
            key=lambda each: (each.candidate.devices, -each.rate),
        )

    def _rated(self, candidates: Sequence[ModeCandidate]) -> list[Contestant]:
        """Rate all by drawn batches; then simulate those that are nearly as fast as the best."""
        drawn = [self._drawn(each) for each in candidates]
        rated = [self._contestant(each, rate) for each, rate in zip(candidates, drawn, strict=True)]
        if self.times_of is None:
            return rated
        found: list[Contestant] = []
        best = max((each.rate for each in rated), default=0.0)
        for index in sorted(range(len(rated)), key=lambda index: -rated[index].rate)[:_MOST_SIMULATED]:
            if rated[index].rate < _NEARLY * best:
                break
            simulated = self._simulated(candidates[index], drawn[index], self.times_of)
            found.append(self._contestant(candidates[index], simulated))
        return found

    def refusal(self, found: dict[Mode, str]) -> ConfigError:
        """Return the error if nothing fits. found: why, by mode."""
        if self.refused is not None and set(found) <= {*_APART}:
            return self.refused
        reasons = [f"mode {mode}: {reason}" for mode, reason in found.items() if mode not in _APART or not self.refused]
        if self.refused is not None:
            apart = [mode for mode in found if mode in _APART]
            reasons.insert(0, f"mode {' and '.join(apart)}: {self.refused}")
        return ConfigError("no mode can be planned:\n  " + "\n  ".join(reasons) if len(reasons) > 1 else reasons[0])

    def _impossible(self, mode: Mode) -> str:
        trained = "encoders" not in self.request.workload.freeze
        if trained and mode in (*_APART, "colocated"):
            return f"{CANNOT_RUN}: only monolithic trains an encoder"
        if mode == "monolithic" and len(self.request.model.encoders) > 1:
            return f"{CANNOT_RUN}: ranks hold one encoder, and there are {len(self.request.model.encoders)}"
        return ""

    def _apart(self, mode: Mode) -> Found:
        if self.allocation is None:
            return Found((), str(self.refused))
        return Found(tuple(self._candidate(mode, choice) for choice in self.allocation.choices))

    def _candidate(self, mode: Mode, choice: Choice) -> ModeCandidate:
        assert self.allocation is not None
        workload, encoders = self.request.workload, {each.module: each for each in choice.producers.values()}
        rate = min(choice.consumer.rate, *(each.rate / workload.share(name) for name, each in encoders.items()))
        devices = choice.consumer.devices + sum(each.devices for each in encoders.values())
        if self.allocation.shared:
            rate, devices = self.allocation.rate, 1
        return ModeCandidate(
            mode, choice.consumer, encoders, choice.consumer.settings, rate_formula=rate, devices=devices
        )

    def _drawn(self, candidate: ModeCandidate) -> DrawnRate:
        at, run = self.request.of(candidate.backbone), self._as_run(candidate)
        key = _work_key(run)
        if key not in self.drawn:
            surrogate = self.surrogate_for(at)
            slowdown, _ = slowdown_of(at, surrogate, candidate.backbone.device_type)
            self.drawn[key] = DrawnWork.of(at, surrogate, run, self.batches, slowdown)
        return rate_of(at, run, self.batches, self.drawn[key])

    def _simulated(self, candidate: ModeCandidate, drawn: DrawnRate, times_of: DeviceTimesOf) -> DrawnRate:
        at, run = self.request.of(candidate.backbone), self._as_run(candidate)
        key = _work_key(run)
        if key not in self.simulated:
            surrogate = self.surrogate_for(at)
            slowdown, _ = slowdown_of(at, surrogate, candidate.backbone.device_type)
            self.simulated[key] = simulated_work(at, surrogate, times_of, run, self.batches, slowdown)
        found = simulated_run(at, run, self.batches, self.simulated[key])
        return replace(drawn, rate=at.workload.global_batch_size / found.step_s, starved=found.starved)

    def _as_run(self, candidate: ModeCandidate) -> ModeCandidate:
        return as_run(candidate, self.allocation)

    def _contestant(self, candidate: ModeCandidate, drawn: DrawnRate) -> Contestant:
        at = self.request.of(candidate.backbone)
        surrogate, plan = self.surrogate_for(at), candidate.plan
        slowdown, is_measured = slowdown_of(at, surrogate, candidate.backbone.device_type)
        lost_s = host_s(at, surrogate, candidate, drawn.idle_s)
        predicted = at.workload.global_batch_size / (at.workload.global_batch_size / drawn.rate + lost_s)
        shares = {name: at.workload.share(name) for name in candidate.encoders}
        return Contestant(
            candidate,
            corrected_rate(predicted, self.trials, plan, may_be_tried=self.may_be_tried),
            drawn.imbalance,
            drawn.starved,
            slowdown,
            is_measured,
            shares,
            predicted,
            was_tried(self.trials, plan),
        )


def _work_key(candidate: ModeCandidate) -> object:
    """What the work of a candidate's steps depends on."""
    mode = "decoupled" if candidate.mode == "disaggregated" else candidate.mode
    return mode, candidate.backbone, *candidate.encoders.items(), candidate.encoder_layers


def host_s(request: Request, surrogate: Surrogate, candidate: ModeCandidate, idle_s: float) -> float:
    """Return seconds of a step that the run's own processes take from its devices, as they do where cores are these.

    Encoders give way to them, so they take what encoders leave over first, and then a share of each device. Ranks wait
    for each other: without encoders, time that one of them loses is lost for all.

    idle_s: device seconds of a step in which encoders on devices of their own have nothing to do.
    """
    dp, times = candidate.backbone.degrees.dp, surrogate.times[candidate.backbone.device_type]
    num_microbatches = dp * request.workload.num_microbatches(np.array([dp])).astype(np.float64)
    replicas, has_encoders = np.array([float(dp)]), bool(candidate.encoders)
    seconds = float(times.host_s(num_microbatches, replicas, has_encoders=has_encoders)[0])
    return max(0.0, seconds - idle_s) / (candidate.devices if has_encoders else 1)
