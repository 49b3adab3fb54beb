"""Times of many steps in a row: encoders work ahead within the lookahead, the backbone runs its action lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from flowtrain.costs.flops import FloatArray
from flowtrain.costs.microbatches import MicrobatchColumns
from flowtrain.simulator.encoders import EncodedStep, shared_end_s
from flowtrain.simulator.engine import Timeline
from flowtrain.simulator.memory import HeldMemory, held_memory, rank_peaks
from flowtrain.simulator.pace import Pace
from flowtrain.simulator.program import Program
from flowtrain.simulator.step import StepSimulator


@dataclass(frozen=True, slots=True, eq=False)
class StepWork:
    """One step."""

    program: Program
    """Operations of all replicas."""
    works: MicrobatchColumns
    """Microbatches of all replicas, one replica after another."""
    encoded: tuple[EncodedStep, ...] = ()
    """By encoder with actors of its own, as in ``replicas`` of ``simulate``."""
    shared_s: float = 0.0
    """Backbone seconds of each device, where the devices also run encoders; otherwise 0."""
    shared_encode_s: float = 0.0
    """Seconds that encoding adds to that on the device that encodes most of the step."""


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedStep:
    """Times of one step, in seconds since the run began."""

    begin_s: float
    end_s: float
    """After the update."""
    starved_s: float
    """Seconds that replicas wait for data: mean over replicas of each one's slowest rank, as in metrics."""
    held_up_s: float
    """Seconds that the replica with the longest waits for data waits; the others wait for it."""
    busy_s: float
    """Seconds that a mean rank computes, or waits for collectives that computing does not hide."""

    @classmethod
    def of(cls, begin_s: float, end_s: float, timeline: Timeline) -> SimulatedStep:
        """Return a step with these times."""
        program = timeline.program
        spans = timeline.ends[program.fetch_ops] - timeline.starts[program.fetch_ops]
        waited = np.bincount(program.fetches.rank, spans, program.num_ranks)
        slowest = waited.reshape(program.num_replicas, -1).max(axis=1)
        starved = float(np.average(slowest, weights=program.stands_for))
        return cls(begin_s, end_s, starved, float(slowest.max()), program.mean(timeline.busy_s))

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedRun:
    """Times of many steps."""

    steps: tuple[SimulatedStep, ...]
    last: Timeline
    """Of the last step that was timed."""
    simulator: StepSimulator
    works: tuple[StepWork, ...]
    """The different steps; they follow each other again and again."""

    @property
    def ends_s(self) -> FloatArray:
        """When each step ends."""
        return np.array([step.end_s for step in self.steps])

    @property
    def step_s(self) -> float:
        """Mean seconds of a step in the second half, where encoders and backbone have found their pace."""
        half, ends = len(self.steps) // 2, self.ends_s
        before = float(ends[half - 1]) if half else 0.0
        return (float(ends[-1]) - before) / (len(ends) - half)

    @property
    def starved(self) -> float:
        """Share of the second half's time in which replicas wait for data."""
        counted = self._counted
        return sum(step.starved_s for step in counted) / sum(step.seconds for step in counted)

    @property
    def held_up(self) -> float:
        """Share of the second half's time in which each step's hungriest replica waits for data."""
        counted = self._counted
        return sum(step.held_up_s for step in counted) / sum(step.seconds for step in counted)

    @property
    def bubble(self) -> float:
        """Share of the second half's time in which a mean rank neither computes nor waits for collectives."""
        counted = self._counted
        return 1.0 - sum(step.busy_s for step in counted) / sum(step.seconds for step in counted)

    def memory(self) -> HeldMemory:
        """Return what ranks hold during the last step."""
        return self._held(self.works[(len(self.steps) - 1) % len(self.works)])

    def rank_peaks(self) -> tuple[dict[str, int], ...]:
        """Return what each pipeline rank holds at its fullest moment in any replica and step, by kind of bytes."""
        return rank_peaks([self._held(work) for work in self.works])

    def _held(self, work: StepWork) -> HeldMemory:
        return held_memory(self.simulator, work.program, work.works)

    @property
    def _counted(self) -> tuple[SimulatedStep, ...]:
        return self.steps[len(self.steps) // 2 :]


def simulate(
    simulator: StepSimulator,
    steps: Sequence[StepWork],
    *,
    num_steps: int,
    replicas: Sequence[int] = (),
    lookahead: int = 1,
    is_barrier: bool = False,
) -> SimulatedRun:
    """Return the times of ``num_steps`` steps; ``steps`` follow each other again and again.

    A step may be encoded once the one ``lookahead + 1`` before it is done. A microbatch may start when its images are
    encoded, or with ``is_barrier`` when those of the whole step are. Steps that have found their pace are not timed.

    num_steps: at least 1. replicas: of each encoder with actors of its own.
    """
    free = [np.zeros(count) for count in replicas]
    durations = [simulator.durations(step.program, step.works) for step in steps]
    optimizer_s, now = simulator.optimizer_s(), 0.0
    done: list[SimulatedStep] = []
    pace, devices = Pace(len(steps), lookahead), [np.zeros(1)] if any(step.shared_s for step in steps) else []
    ends, works, encodes = np.zeros(num_steps), np.zeros(num_steps), np.zeros(num_steps)
    for index in range(num_steps):
        step, (seconds, transfers) = steps[index % len(steps)], durations[index % len(steps)]
        opened = done[index - lookahead - 1].end_s if index > lookahead else 0.0
        program = step.program
        timeline = Timeline(
            program,
            seconds,
            transfers,
            ready_s=_ready(step, free, opened, is_barrier=is_barrier),
            begin_s=np.full(program.num_ranks, now),
            buffered=simulator.buffered,
        )
        alone = end = timeline.makespan_s + optimizer_s
        works[index], encodes[index] = step.shared_s, step.shared_encode_s
        for free_s in devices:
            free_s[0] = shared_end_s(ends, works, encodes, index, lookahead)
            end = max(end, float(free_s[0])) if step.shared_s else end
        ends[index] = end
        done.append(SimulatedStep.of(now, end, timeline))
        now = end
        if pace.is_found(ends[: index + 1], [*free, *devices], done[-1].starved_s + end - alone):
            pace.go_on(ends, index + 1)
            break
    for index in range(len(done), num_steps):
        begin, end = ends[index - 1 : index + 1].tolist()
        done.append(replace(done[index - len(steps)], begin_s=begin, end_s=end))
    return SimulatedRun(tuple(done), timeline, simulator, tuple(steps))


def _ready(step: StepWork, free: Sequence[FloatArray], opened: float, *, is_barrier: bool) -> FloatArray:
    """When the data of each fetch are there, ``[F]``."""
    slots = step.program.fetches.microbatch
    ready = np.zeros(len(slots))
    for encoded, heap in zip(step.encoded, free, strict=True):
        if len(encoded.seconds):
            each = encoded.ready_s(heap, opened)
            ready = np.maximum(ready, each[-1] if is_barrier else each[slots])
    return ready
