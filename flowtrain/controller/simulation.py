"""What a run would take, mode by mode, by the simulator (``flowtrain simulate``). No Ray, no torch."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from flowtrain.allocator.drawn import drawn_rate
from flowtrain.allocator.drawn_batches import DrawnBatches
from flowtrain.allocator.mode_rating import ModeRating
from flowtrain.allocator.mode_reasons import AS_FAST, NOTABLE, place, simplicity
from flowtrain.allocator.modes import as_run, host_s
from flowtrain.allocator.plan import FEEDER_RATE, changed_degrees
from flowtrain.allocator.simulated import partition_of
from flowtrain.allocator.simulated_flow import FlowCandidate
from flowtrain.allocator.whole import slowdown_of
from flowtrain.controller.planning.devices import AskedDevices
from flowtrain.controller.planning.planned import Planned
from flowtrain.controller.planning.pool import with_room
from flowtrain.controller.planning.report import PlanReport, make_report, startable_plan
from flowtrain.controller.planning.request import device_times, request_of, surrogates
from flowtrain.costs.profile import Profile
from flowtrain.errors import ConfigError
from flowtrain.pipeline.partition import Partition
from flowtrain.simulator.flow_run import FEEDERS, Disturbances, FlowRun, Loss
from flowtrain.simulator.gantt import memory_events, text_rows, trace_events

SIMULATION_SCHEMA = 3
MOST_ROWS = 16
"""Ranks in a Gantt chart."""
DOWN_S = 30.0
"""Seconds until a lost process is back, if nothing else is said: it starts, loads its weights, and joins."""
_NEVER_IDLE, _NEVER_STARVED = 0.99, 0.002
"""A producer that works more than the first share of its time sets the rate if a replica waits more than the second."""
_LOSS = re.compile(r"(\w+)@(\d+(?:\.\d+)?)(?:\+(\d+(?:\.\d+)?))?")


@dataclass(frozen=True)
class SimulatedMode:
    """The best plan of one mode, and its simulated run."""

    planning: PlanReport
    rating: ModeRating
    run: FlowRun
    partition: Partition
    num_feeders: int
    host_s: float = 0.0
    """Seconds of a step that the run's own processes take from its devices, where cores are these; not in ``run``."""

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return self.run.step_s + self.host_s

    @property
    def rate(self) -> float:
        """Samples/s."""
        return self.planning.planned.workload.global_batch_size / self.step_s

    @property
    def limited_by(self) -> str:
        """The module that sets the rate: the least idle producer if a replica is starved, otherwise the backbone."""
        busy = self.run.flow.busy
        producer = max(busy, key=lambda name: busy[name])
        if self.run.held_up >= (_NEVER_STARVED if busy[producer] >= _NEVER_IDLE else NOTABLE):
            return producer
        return "shared devices" if self._shares_devices else "backbone"

    @property
    def tokens_per_s(self) -> float:
        """Tokens/s of the run."""
        return self.rate * self.planning.planned.workload.tokens_per_sample

    @cached_property
    def mfu(self) -> float:
        """Model FLOPs of all modules over the peak of the devices in use."""
        flops = self.planning.planned.workload.flops(self.planning.planned.model)
        backbone = flops.backbone + flops.connector
        each = float((backbone if self.rating.mode == "llm_only" else backbone + flops.encoders).mean())
        peak = sum(
            module.devices * self.planning.cluster[module.device_type].flops for module in self._with_own_devices()
        )
        return each * self.rate / peak

    def _with_own_devices(self) -> tuple[Any, ...]:
        """Modules, without encoders that share the backbone's devices."""
        return self.rating.modules[-1:] if self._shares_devices else self.rating.modules

    @property
    def _shares_devices(self) -> bool:
        return sum(module.devices for module in self.rating.modules) > self.rating.devices

    @property
    def peak_nbytes(self) -> dict[str, int]:
        """Peak of each module's fullest device, as the planner predicts it for microbatches of full size."""
        return {module.name: module.peak_nbytes for module in self.rating.modules}

    @cached_property
    def rank_memory(self) -> tuple[dict[str, int], ...]:
        """Bytes of each pipeline rank at the fullest moment of the simulated steps, by kind."""
        return self.run.rank_peaks()

    def gantt(self, width: int) -> list[str]:
        """Return the last step of the first replica's pipeline ranks, a line of text each."""
        timeline = self.run.last
        pp = timeline.program.num_ranks // timeline.program.num_replicas
        return text_rows(timeline, range(min(pp, MOST_ROWS)), width)

    def trace(self) -> dict[str, Any]:
        """Return the last step as a Chrome trace, with the memory of each rank."""
        timeline = self.run.last
        events = trace_events(timeline, self.partition) + memory_events(self.run.memory(), timeline)
        return {"displayTimeUnit": "ms", "traceEvents": events}

    def as_record(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
        return {
            "mode": self.rating.mode,
            "degrees": {module.name: str(module.degrees) for module in self.rating.modules},
            "devices": self.rating.devices,
            "rate": self.rate,
            "rate_planned": self.rating.rate,
            "rate_formula": self.rating.rate_formula,
            "tokens_per_s": self.tokens_per_s,
            "num_steps": len(self.run.steps),
            "step_s": self.step_s,
            "host_s": self.host_s,
            "mfu": self.mfu,
            "starved": self.run.starved,
            "bubble": self.run.bubble,
            "limited_by": self.limited_by,
            "peak_nbytes": self.peak_nbytes,
            "flow": asdict(self.run.flow),
            "rank_peak_nbytes": [sum(each.values()) for each in self.rank_memory],
            "rank_memory": list(self.rank_memory),
        }


@dataclass(frozen=True)
class SimulationReport:
    """Simulated modes, the fastest first; ``llm_only`` last, since it is a bound."""

    planning: PlanReport
    modes: tuple[SimulatedMode, ...]
    seconds: float
    """Of packing and simulating, without planning."""
    cpu_seconds: float
    """Processor time of it, which other processes of the machine do not lengthen by waits."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """By mode: why a plan that fits could not be simulated."""
    losses: Sequence[Loss] = ()
    """That were asked for."""

    @property
    def not_possible(self) -> dict[str, str]:
        """By mode: why there is no simulation of it."""
        unrated: dict[str, str] = {
            each.mode: each.reason for each in self.planning.comparison.ratings if each.rate is None
        }
        return {**unrated, **self.refused}

    @property
    def feeding(self) -> str | None:
        """Which modes feeders set the rate of, with their number; None if they set no mode's."""
        slow = [f"{mode.rating.mode} ({mode.num_feeders})" for mode in self.modes if mode.limited_by == FEEDERS]
        if not slow:
            return None
        return (
            f"they set the rate of {', '.join(slow)}: each reads {FEEDER_RATE:.0f} samples/s, and the formula does not "
            "count them; data.num_feeders=N sets another number"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What the run does and the simulated steps leave out, and where they are not the configuration's own."""
        planned, found = self.planning.planned, [*self._ties(), *self._without_effect()]
        if planned.is_run and (changed := changed_degrees(self.planning.plan, planned.config)):
            found.append(
                f"the plan of {self.planning.winner.mode} changes the backbone's degrees ({' '.join(changed)}); "
                "flowtrain pack --compare simulates steps with the configuration's own, if the times of its devices "
                "are known (allocator.profile or backbone.accelerator_type)"
            )
        if planned.config.pipeline.policy == "pipetune":
            found.append(
                "pipeline.policy is 'pipetune'; its searches take no time here, as in a run whose lookahead hides them"
            )
        return tuple(found)

    def _ties(self) -> Iterator[str]:
        """Which modes are too close to the fastest to tell, and which mode the plan has."""
        rivals = [mode for mode in self.modes if mode.rating.mode != "llm_only"]
        fast = [mode.rating.mode for mode in rivals if mode.rate >= AS_FAST * rivals[0].rate]
        planned = self.planning.winner.mode
        why = "the simplest of them" if planned == min(fast, key=simplicity, default=None) else "by its own rates"
        if len(fast) > 1:
            yield (
                f"{', '.join(fast)} are as fast (within {1.0 - AS_FAST:.1%}); with mode=auto flowtrain plan takes "
                f"{planned}, {why}"
            )
        elif fast and planned not in fast:
            yield f"{fast[0]} is the fastest here; with mode=auto flowtrain plan takes {planned}, {why}"

    def _without_effect(self) -> Iterator[str]:
        """Losses that no simulated mode had."""
        for loss in self.losses:
            ends = [float(mode.run.ends_s[-1]) for mode in self.modes if loss.module in mode.run.flow.busy]
            asked = f"--lose {loss.module}@{loss.at_s:g} changes nothing"
            if not ends:
                yield f"{asked}: no simulated mode has actors of {loss.module}"
            elif loss.at_s >= max(ends):
                yield f"{asked}: the simulated steps end after {max(ends):.4g} s; --steps N simulates more"

    def as_record(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
        return {
            "schema": SIMULATION_SCHEMA,
            "source": self.planning.planned.source,
            "devices": {each.name: each.count for each in self.planning.cluster.device_types},
            "profile": self.planning.profile.source if self.planning.profile is not None else None,
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "modes": [mode.as_record() for mode in self.modes],
            "not_possible": self.not_possible,
            "feeding": self.feeding,
            "notes": list(self.notes),
        }


def simulate_plan(
    planned: Planned,
    asked: AskedDevices,
    *,
    profile: Profile | None = None,
    num_steps: int,
    disturbances: Disturbances | None = None,
) -> SimulationReport:
    """Plan, then simulate the best plan of each mode that was planned.

    disturbances: None for encoders that always take their mean time, and no losses; a mode without encoder actors loses
        none. Raises ConfigError if nothing fits, if no mode that was planned can be simulated, and for a loss of what
        the run does not have.
    """
    disturbances = disturbances or Disturbances()
    _check_losses(disturbances.losses, planned)
    planning = make_report(planned, asked, profile=profile)
    started, started_cpu = time.perf_counter(), time.process_time()
    found, refused = _simulated(planning, num_steps, disturbances)
    found.sort(key=lambda each: (each.rating.mode == "llm_only", place(each.rating.mode, each.rate)))
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - started_cpu
    return SimulationReport(planning, tuple(found), seconds, cpu_seconds, refused, disturbances.losses)


def loss_of(text: str) -> Loss:
    """Read ``MODULE@SECONDS`` or ``MODULE@SECONDS+DOWN``; ConfigError for anything else."""
    found = _LOSS.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"losses (--lose) has {text!r}; write MODULE@SECONDS or MODULE@SECONDS+DOWN, as in vision@60+30"
        )
    return Loss(found[1], float(found[2]), DOWN_S if found[3] is None else float(found[3]))


def _check_losses(losses: Sequence[Loss], planned: Planned) -> None:
    known = [*planned.config.encoders, FEEDERS]
    for loss in losses:
        if loss.module not in known:
            raise ConfigError(
                f"losses (--lose) names {loss.module!r}, and the run has {', '.join(known)}; name one of these"
            )


def _simulated(
    planning: PlanReport, num_steps: int, disturbances: Disturbances
) -> tuple[list[SimulatedMode], dict[str, str]]:
    """Simulated modes, and why others could not be simulated; ConfigError if none could."""
    planned, config = planning.planned, planning.planned.config
    times_of = device_times(config, planning.rules, planning.profile)
    surrogate_for, request = surrogates(times_of), request_of(planned, planning.cluster, planning.profile)
    batches = DrawnBatches.draw(request.decided().workload, scheduler=config.step_scheduler)
    found: list[SimulatedMode] = []
    refused: dict[str, str] = {}
    for rating in planning.comparison.ratings:
        candidate = rating.candidate
        if candidate is None:
            continue
        candidate, at = as_run(candidate, planning.comparison.allocation), request.of(candidate.backbone)
        surrogate = surrogate_for(at)
        slowdown, _ = slowdown_of(at, surrogate, candidate.backbone.device_type)
        plan = with_room(planned, startable_plan(planned, rating, planning.cluster), planning.devices_per_node)
        own = [each for each in disturbances.losses if each.module in (FEEDERS, *candidate.encoders)]
        disturbed = replace(disturbances, losses=tuple(own))
        flow = FlowCandidate(at, surrogate, times_of, candidate, batches, config, plan, slowdown, disturbed)
        try:
            run = flow.simulated(num_steps)
        except ConfigError as error:  # its pool is too small
            refused[rating.mode] = str(error)
            continue
        idle_s = drawn_rate(at, surrogate, candidate, batches, slowdown).idle_s
        lost_s = host_s(at, surrogate, candidate, idle_s)
        num_feeders = plan.feeder.data_parallel_size
        found.append(SimulatedMode(planning, rating, run, partition_of(at, candidate), num_feeders, lost_s))
    if not found:
        raise ConfigError("; ".join(f"{mode}: {reason}" for mode, reason in refused.items()))
    return found, refused
