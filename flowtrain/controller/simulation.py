"""What a run would take, mode by mode, by the simulator (``flowtrain simulate``). No Ray, no torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flowtrain.allocator.drawn_batches import DrawnBatches
from flowtrain.allocator.mode_rating import ModeRating
from flowtrain.allocator.modes import as_run
from flowtrain.allocator.simulated import partition_of, simulated_run
from flowtrain.allocator.whole import slowdown_of
from flowtrain.controller.planning.devices import AskedDevices
from flowtrain.controller.planning.planned import Planned
from flowtrain.controller.planning.report import PlanReport, make_report
from flowtrain.controller.planning.request import device_times, request_of, surrogates
from flowtrain.costs.profile import Profile
from flowtrain.pipeline.partition import Partition
from flowtrain.simulator.gantt import memory_events, text_rows, trace_events
from flowtrain.simulator.run import SimulatedRun

SIMULATION_SCHEMA = 1
MOST_ROWS = 16
"""Ranks in a Gantt chart."""


@dataclass(frozen=True)
class SimulatedMode:
    """The best plan of one mode, and its simulated run."""

    planning: PlanReport
    rating: ModeRating
    run: SimulatedRun
    partition: Partition

    @property
    def rate(self) -> float:
        """Samples/s."""
        return self.planning.planned.workload.global_batch_size / self.run.step_s

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
        modules = self.rating.modules
        shared = sum(module.devices for module in modules) > self.rating.devices
        return modules[-1:] if shared else modules

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
            "step_s": self.run.step_s,
            "mfu": self.mfu,
            "starved": self.run.starved,
            "bubble": self.run.bubble,
            "peak_nbytes": self.peak_nbytes,
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

    def as_record(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
        return {
            "schema": SIMULATION_SCHEMA,
            "source": self.planning.planned.source,
            "devices": {each.name: each.count for each in self.planning.cluster.device_types},
            "profile": self.planning.profile.source if self.planning.profile is not None else None,
            "seconds": self.seconds,
            "modes": [mode.as_record() for mode in self.modes],
            "not_possible": {each.mode: each.reason for each in self.planning.comparison.ratings if each.rate is None},
        }


def simulate_plan(
    planned: Planned,
    asked: AskedDevices,
    *,
    profile: Profile | None = None,
    num_steps: int,
) -> SimulationReport:
    """Plan, then simulate the best plan of each mode that was planned; ConfigError if nothing fits."""
    planning = make_report(planned, asked, profile=profile)
    started = time.perf_counter()
    found = sorted(_simulated(planning, num_steps), key=lambda mode: (mode.rating.mode == "llm_only", -mode.rate))
    return SimulationReport(planning, tuple(found), time.perf_counter() - started)


def _simulated(planning: PlanReport, num_steps: int) -> Iterator[SimulatedMode]:
    planned, config = planning.planned, planning.planned.config
    times_of = device_times(config, planning.efficiency, planning.profile)
    surrogate_for, request = surrogates(times_of), request_of(planned, planning.cluster, planning.profile)
    batches = DrawnBatches.draw(request.decided().workload, scheduler=config.scheduler)
    for rating in planning.comparison.ratings:
        candidate = rating.candidate
        if candidate is None:
            continue
        candidate, at = as_run(candidate, planning.comparison.allocation), request.of(candidate.backbone)
        surrogate = surrogate_for(at)
        slowdown, _ = slowdown_of(at, surrogate, candidate.backbone.device_type)
        run = simulated_run(at, surrogate, times_of, candidate, batches, slowdown=slowdown, num_steps=num_steps)
        yield SimulatedMode(planning, rating, run, partition_of(at, candidate))
