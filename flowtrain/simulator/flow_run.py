"""A whole run in virtual time: the coordinator's own flow class, driven by feeders, encoders, replicas and faults.

The flow sizes, packs, leases, releases and moves its window as in a run. Only what its processes do takes virtual time
instead of real time.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from flowtrain.errors import ConfigError
from flowtrain.flow.flow import Flow
from flowtrain.mempool.gva import AddressSpace
from flowtrain.simulator.consumers import Backbone, Training
from flowtrain.simulator.producers import LostWork, Producer
from flowtrain.simulator.run import SimulatedRun
from flowtrain.simulator.samples import DrawnSamples
from flowtrain.simulator.virtual import Clock, Occupancy, VirtualFlow
from flowtrain.simulator.virtual_encoders import EncoderGroup, EncoderLine
from flowtrain.simulator.virtual_feeders import FeederGroup, VirtualFeeder

FEEDERS = "feeder"
"""The feeders, as a module that may be lost."""
_MANY_OBJECTS = 100_000
"""New objects between two rounds of the garbage collector."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A process that is lost, and comes back with an empty segment."""

    module: str
    """An encoder's name, or ``FEEDERS``."""
    at_s: float
    """Seconds since the run began. The n-th loss of a module hits its n-th replica, in turn."""
    down_s: float
    """Seconds until it is back."""


@dataclass(frozen=True, slots=True)
class Disturbances:
    """What makes a run uneven beside its data."""

    encoder_spread: float = 0.0
    """Standard deviation of a forward's time over its mean."""
    losses: tuple[Loss, ...] = ()
    seed: int = 0
    """Of what is drawn."""


@dataclass(frozen=True, slots=True, eq=False)
class FlowWorld:
    """A run to simulate.

    make_flow: builds its flow, whose clock it gets. space, alignment: of the pool.
    """

    make_flow: Callable[[Clock], Flow]
    space: AddressSpace
    alignment: int
    samples: DrawnSamples
    feeders: FeederGroup
    encoders: tuple[EncoderGroup, ...]
    backbone: Backbone
    disturbances: Disturbances = field(default_factory=Disturbances)


@dataclass(frozen=True, slots=True)
class FlowFigures:
    """How the data flowed, over the whole run."""

    starved_s: float
    """Seconds that a mean replica waited for data."""
    blocked_s: Mapping[str, float]
    """By encoder: seconds that a mean replica of it had nothing to encode."""
    busy: Mapping[str, float]
    """By encoder, and of ``FEEDERS``: share of the second half in which a mean process worked, or was lost."""
    pool_nbytes: int
    """Segments of all encoders."""
    pool_mean_nbytes: float
    """In use by features, and promised to leases; mean over time."""
    pool_peak_nbytes: int
    """As before, at most."""
    feeders_peak_nbytes: int
    """In use by texts and encoded images in the feeders' segments, at most."""
    lookahead: float
    """Units after a step that miss no part, at its end; mean."""
    lost: LostWork
    """What losses of processes cost."""


@dataclass(frozen=True, slots=True, eq=False)
class FlowRun(SimulatedRun):
    """Times of a run, and how its data flowed."""

    flow: FlowFigures


def simulate_flow(world: FlowWorld) -> FlowRun:
    """Return the times of a run.

    Raises ConfigError if the pool is too small for the run to end.
    """
    return _Simulation(world).run()


@contextmanager
def _rare_collection() -> Iterator[None]:
    """Let the garbage collector look for cycles less often: a run makes millions of short-lived records."""
    before = gc.get_threshold()
    gc.set_threshold(_MANY_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class _Simulation:
    """All processes of one run."""

    def __init__(self, world: FlowWorld) -> None:
        self._world = world
        self._run = run = VirtualFlow(world.make_flow, world.alignment)
        self._features, self._fed, self._lost = Occupancy(run), Occupancy(run), LostWork()
        disturbances, samples, space = world.disturbances, world.samples, world.space
        self._feeders = [
            VirtualFeeder(run, world.feeders, number, samples, space, self._fed, self._lost)
            for number in range(world.feeders.count)
        ]
        self._lines = [
            EncoderLine(
                run,
                group,
                samples,
                space,
                self._features,
                self._lost,
                spread=disturbances.encoder_spread,
                seed=disturbances.seed + number,
            )
            for number, group in enumerate(world.encoders)
        ]
        self._training = Training(run, world.backbone)
        self._taken_at_half: dict[str, tuple[float, float]] = {}

    def run(self) -> FlowRun:
        with _rare_collection():
            self._run_all()
        return self._result()

    def _run_all(self) -> None:
        self._plan_losses(self._world.disturbances.losses)
        for feeder in self._feeders:
            feeder.start()
        for line in self._lines:
            for encoder in line.encoders:
                encoder.start()
        self._training.start()
        self._settle()
        self._run_until(self._world.backbone.num_steps // 2)
        self._taken_at_half = self._taken_s()
        self._run_until(self._world.backbone.num_steps)

    def _run_until(self, num_steps: int) -> None:
        """Go on until so many steps are done."""
        steps = self._training.steps
        while len(steps) < num_steps:
            if not self._run.advance():
                raise self._stuck()
            self._settle()

    def _plan_losses(self, losses: Sequence[Loss]) -> None:
        modules: dict[str, Sequence[Producer]] = {line.group.name: line.encoders for line in self._lines}
        modules[FEEDERS] = self._feeders
        counts: Counter[str] = Counter()
        for loss in sorted(losses, key=lambda each: each.at_s):
            assert loss.module in modules, f"{loss.module} is none of {list(modules)}"
            processes = modules[loss.module]
            lost = processes[counts[loss.module] % len(processes)]
            counts[loss.module] += 1
            self._run.at(loss.at_s, partial(lost.lose, loss.down_s))

    def _settle(self) -> None:
        """Let all who were woken go on, until nobody can."""
        run = self._run
        goes_on = True
        while goes_on:
            if run.may_feed:
                run.may_feed = False
                for feeder in self._feeders:
                    feeder.ask()
            if run.has_room:
                run.has_room = False
                for feeder in self._feeders:
                    feeder.put()
            if run.may_lease:
                run.may_lease = False
                for line in self._lines:
                    line.wake()
            goes_on = self._training.settle() or run.may_feed or run.has_room or run.may_lease

    def _taken_s(self) -> dict[str, tuple[float, float]]:
        """By module: seconds until now in which its processes worked or were lost, and with those that they waited."""
        found = {}
        for line in self._lines:
            taken_s = line.busy_s + sum(encoder.down_s for encoder in line.encoders)
            found[line.group.name] = taken_s, taken_s + line.blocked_s
        taken_s = sum(feeder.busy_s + feeder.down_s for feeder in self._feeders)
        found[FEEDERS] = taken_s, len(self._feeders) * self._run.now_s
        return found

    def _busy(self) -> dict[str, float]:
        """By module: see ``FlowFigures``."""
        busy = {}
        for name, (taken_s, all_s) in self._taken_s().items():
            before, all_before = self._taken_at_half[name]
            busy[name] = min((taken_s - before) / (all_s - all_before), 1.0) if all_s > all_before else 0.0
        return busy

    def _stuck(self) -> ConfigError:
        who = max(self._training.readers, key=lambda reader: -reader.unit)
        return ConfigError(
            f"the simulated run gets stuck after {self._run.now_s:.1f} s and {len(self._training.steps)} steps: "
            f"{who.describe_wait()}; give the pool more memory (encoders.<name>.segment_nbytes, "
            "pool.feeder_segment_nbytes)"
        )

    def _result(self) -> FlowRun:
        training = self._training
        assert training.last is not None
        figures = FlowFigures(
            starved_s=sum(step.starved_s for step in training.steps),
            blocked_s={line.group.name: float(line.blocked_s) / line.group.count for line in self._lines},
            busy=self._busy(),
            pool_nbytes=sum(line.group.count * line.group.segment_nbytes for line in self._lines),
            pool_mean_nbytes=self._features.mean_nbytes,
            pool_peak_nbytes=self._features.peak_nbytes,
            feeders_peak_nbytes=self._fed.peak_nbytes,
            lookahead=sum(training.lookaheads) / len(training.lookaheads),
            lost=self._lost,
        )
        timeline, simulator = training.last[1], self._world.backbone.simulator
        return FlowRun(tuple(training.steps), timeline, simulator, training.different_steps(), figures)
