"""Positions a second that pass through the flow's whole life cycle: size, lease, ready, plan, consume.

python benchmarks/directory.py [--repeats N] [--units N] [--json]

Each position has three parts: text, encoded image, features.
In-process: the calls on parts and microbatches alone. Through its actor: the run's coordinator, called through Ray,
which also plans every step. A feeder, two encoders, a backbone rank and a driver, one process each, send the messages
of a run and do no other work. Exits with 1 if a position is not consumed exactly once.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import ray
from _positions import (
    ALIGNMENT,
    NUM_PATCHES,
    SEGMENT_NBYTES,
    VISION,
    encode,
    feed,
    feed_report,
    ready_of,
    sample_of,
    train,
)
from _report import Figure, at_least, emit

from flowtrain.actors.coordinator import Coordinator, start_flow
from flowtrain.actors.garbage import expect_many_objects, keep_imports
from flowtrain.actors.link import RayLink
from flowtrain.actors.pooling import address_space
from flowtrain.config.load import load_config
from flowtrain.controller.prepare import RunSpec, prepare
from flowtrain.flow.api import CoordinatorApi
from flowtrain.flow.microbatches import Microbatches
from flowtrain.flow.parts import Parts
from flowtrain.flow.units import unit_sequence
from flowtrain.scheduler.step_planner import StepPlanner
from flowtrain.types.events import UnitDone
from flowtrain.types.memory import Tier
from flowtrain.types.messages import FlowSettings
from flowtrain.types.samples import SamplerState, SizedSample

ROOT = Path(__file__).resolve().parents[1]
POSITIONS_PER_UNIT = 512
IN_PROCESS_TARGET, ACTOR_TARGET = 50_000.0, 10_000.0
WARM_UP_UNITS = 8
OTHERS = "others"
"""Messages and plans, which other processes make, or which are measured elsewhere."""
OVERRIDES = (
    f"training.global_batch_size={POSITIONS_PER_UNIT}",
    "data.eval=null",
    "scheduler.microbatch_tokens=16384",
    f"encoders.vision.max_batch_patches={64 * NUM_PATCHES}",
    "encoders.vision.segment_nbytes=1073741824",
)
"""An encode batch of 64 images; a microbatch of 16384 tokens, about 45 samples."""


def samples_of(num_units: int) -> list[list[SizedSample]]:
    """The samples of each unit."""
    return [[sample_of(unit * POSITIONS_PER_UNIT + k) for k in range(POSITIONS_PER_UNIT)] for unit in range(num_units)]


class Laps:
    """Seconds since the lap before, by what was done in them."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._since = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] += now - self._since
        self._since = now


def in_process_us(run_spec: RunSpec, num_units: int) -> dict[str, float]:
    """Microseconds a position of each call on parts and microbatches, in this process, without messages and plans."""
    space = address_space(run_spec.config.pool)
    parts = Parts(space, alignment=ALIGNMENT, lease_timeout_s=600.0)
    microbatches = Microbatches(parts)
    planner = StepPlanner.from_config(run_spec.config, 1, run_spec.cost)
    bases = [space.gva(Tier.DRAM, owner, 0) for owner in (0, 1)]
    laps, num_consumed = Laps(), 0
    units = unit_sequence(num_units, POSITIONS_PER_UNIT, None)
    for unit, samples in zip(units, samples_of(num_units), strict=True):
        report, plan = feed_report(unit, samples, bases[0]), planner.plan(unit, samples)
        laps.lap(OTHERS)
        parts.add_sized(report.sized, 0, report.texts, report.images)
        laps.lap("add_sized")
        microbatches.add(plan)
        laps.lap("add")
        while (lease := parts.leases.grant(1, VISION, SEGMENT_NBYTES)) is not None:
            laps.lap("grant")
            reported = ready_of(lease, bases[1])
            laps.lap(OTHERS)
            for part in reported:
                parts.ready(1, part)
            laps.lap("ready")
        for slot in range(plan.num_slots):
            assert microbatches.locate(unit.index, slot, 0), "a microbatch is not ready"
            laps.lap("locate")
            microbatches.release(unit.index, (slot,), 0)
            laps.lap("release")
        num_consumed += len(parts.consume(microbatches.end(unit.index)))
        laps.lap("consume")
        parts.holdings.take_released(0)
        parts.holdings.take_released(1)
        laps.lap("take_released")
    if num_consumed != num_units * POSITIONS_PER_UNIT:
        sys.exit(f"{num_consumed} of {num_units * POSITIONS_PER_UNIT} positions were consumed")
    return {call: 1e6 * seconds / num_consumed for call, seconds in laps.seconds.items() if call != OTHERS}


class MeasuredCoordinator(Coordinator):
    """A coordinator that also reports the processor time of its process."""

    async def cpu_s(self) -> float:
        return time.process_time()


class Other:
    """Another actor of the run, in its own process as in a run."""

    def __init__(self, coordinator: Any) -> None:
        self._link = RayLink(coordinator)

    def prepare(self, num_units: int) -> None:
        """Get ready, before the clock starts."""
        self._samples = iter(samples_of(num_units))
        keep_imports()  # as every member of the pool does

    def feed(self, base: int) -> None:
        expect_many_objects()  # as the feeder does
        feed(self._link, "feeder-0", base, self._samples)

    def encode(self, name: str, base: int) -> None:
        encode(self._link, name, base)

    def train(self, depth: int) -> None:
        train(self._link, depth)


def actor_rate(run_spec: RunSpec, num_units: int) -> tuple[float, float]:
    """Measure through the coordinator as a Ray actor, once the pipeline is full.

    Returns positions per second, and positions per second of the coordinator's processor time.
    """
    settings = FlowSettings(
        global_batch_size=POSITIONS_PER_UNIT,
        dp_size=1,
        num_steps=num_units,
        total_positions=None,
        start_step=0,
        sampler_state=SamplerState(0),
        cost=run_spec.cost,
        num_rejected=0,
        num_seen=0,
    )
    coordinator = ray.remote(num_cpus=0)(MeasuredCoordinator).remote(
        partial(start_flow, run_spec.config, run_spec.model_spec, settings)
    )
    base = address_space(run_spec.config.pool).gva(Tier.DRAM, 0, 0)
    depth = run_spec.config.backbone.prefetch_microbatches
    others = [ray.remote(num_cpus=0)(Other).remote(coordinator) for _ in range(4)]
    ray.get([others[0].prepare.remote(num_units), *(other.prepare.remote(0) for other in others[1:])], timeout=60)
    cpu_s = -ray.get(coordinator.cpu_s.remote(), timeout=60)
    running = [others[0].feed.remote(base), others[1].train.remote(depth)]
    running += [others[2 + n].encode.remote(f"encoder-{n}", base) for n in range(2)]
    finished_s = list(_finished(RayLink(coordinator), num_units))
    ray.get(running, timeout=60)
    cpu_s += ray.get(coordinator.cpu_s.remote(), timeout=60)
    for actor in (coordinator, *others):
        ray.kill(actor)
    rate = POSITIONS_PER_UNIT * (num_units - WARM_UP_UNITS) / (finished_s[-1] - finished_s[WARM_UP_UNITS - 1])
    return rate, POSITIONS_PER_UNIT * num_units / cpu_s


def _finished(link: RayLink, num_units: int) -> Iterator[float]:
    """Time at which the driver gets the event of each finished unit."""
    expected = 0
    while expected < num_units * POSITIONS_PER_UNIT:
        for event in link.ask(CoordinatorApi.events):
            if not isinstance(event, UnitDone):
                continue
            positions = [row.position for row in event.ledger]
            if positions != list(range(expected, expected + POSITIONS_PER_UNIT)):
                sys.exit(f"unit {event.unit.index} consumed other positions than its own")
            expected += POSITIONS_PER_UNIT
            yield time.perf_counter()


def rate_figure(name: str, rates: list[float], target: float) -> Figure:
    load = f"load average {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores"
    return at_least(name, median(rates), "positions/s", target, f"{min(rates):.0f} to {max(rates):.0f}; {load}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--units", type=int, default=48)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    overrides = [*OVERRIDES, f"training.max_steps={args.units}"]
    run_spec = prepare(load_config(ROOT / "configs" / "quickstart.yaml", overrides))
    keep_imports()  # as the coordinator's process does
    in_process_us(run_spec, 2)
    by_call = [in_process_us(run_spec, args.units) for _ in range(args.repeats)]
    rates = [1e6 / sum(each.values()) for each in by_call]
    figures = [rate_figure("in_process", rates, IN_PROCESS_TARGET)]
    figures += [
        Figure(f"in_process_{call}", median(each[call] for each in by_call), "us/position") for call in by_call[0]
    ]
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    pairs = [actor_rate(run_spec, args.units) for _ in range(args.repeats)]
    figures.append(rate_figure("through_actor", [rate for rate, _ in pairs], ACTOR_TARGET))
    per_cpu = [rate for _, rate in pairs]
    note = f"{min(per_cpu):.0f} to {max(per_cpu):.0f}; its rate with a core of its own"
    figures.append(Figure("through_actor_per_cpu_second", median(per_cpu), "positions/s", note=note))
    ray.shutdown()
    emit("directory", figures, args.json)


if __name__ == "__main__":
    main()
