"""The backbone of a simulated run: replicas read microbatches ahead, and train by their action lists."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from flowtrain.costs.flops import FloatArray
from flowtrain.simulator.encoders import shared_end_s
from flowtrain.simulator.engine import NOT_YET, Timeline
from flowtrain.simulator.run import SimulatedStep, StepWork
from flowtrain.simulator.running_step import DataNeeds, RunningStep
from flowtrain.simulator.step import StepSimulator
from flowtrain.simulator.virtual import VirtualFlow
from flowtrain.types.plan import StepPlan

_KEPT = 64
"""Different steps whose durations are kept."""

StepOf = Callable[[StepPlan], StepWork]
"""Returns the backbone's work for a planned step; the same object for equal work."""


@dataclass(frozen=True, slots=True, eq=False)
class Backbone:
    """The backbone of a run."""

    simulator: StepSimulator
    step_of: StepOf
    num_replicas: int
    num_steps: int
    prefetch: int = 3
    """As ``backbone.prefetch_microbatches``."""
    lookahead: int = 1
    """Steps that are encoded ahead, for the bound of devices that also run encoders."""


_Wait = Literal["plan", "room", "data"]


class Reader:
    """Reads a replica's microbatches in the plan's order, as far ahead as there is room; a read takes no time."""

    def __init__(self, training: Training, dp_rank: int, prefetch: int) -> None:
        self._training = training
        self._dp_rank = dp_rank
        self._room = prefetch + 1
        self._at_once = (prefetch + 1) // 2
        self.unit = 0
        self._num_slots = 0  # 0: the unit's plan is not known
        self._num_read = 0
        self.taken_s: deque[float] = deque()
        """When the training takes what is read, as far as that is known."""
        self.waits_for: _Wait | None = None

    def note_plan(self, plan: StepPlan) -> bool:
        """Note the plan of its unit, for which it waits; returns whether its first microbatch is ready."""
        self._num_slots = plan.num_slots
        self.waits_for = "data"
        return self._training.run.flow.microbatches.is_ready(self.unit, 0, self._dp_rank)

    def go_on(self) -> None:
        """Read what is ready and has room."""
        training, rank = self._training, self._dp_rank
        self.waits_for = None
        microbatches = training.run.flow.microbatches
        while True:
            if not self._num_slots:
                plan = training.plan(self.unit)
                if plan is None:
                    self.waits_for = "plan"
                    return
                self._num_slots = plan.num_slots
            left = self._num_slots - self._num_read
            room = self._free_room()
            if room < min(self._at_once, left):
                self.waits_for = "room"
                self.plan_wake_up()
                return
            found = microbatches.locate(self.unit, self._num_read, rank, min(room, left))
            if not found:
                self.waits_for = "data"
                return
            slots = tuple([each.slot for each in found])
            microbatches.release(self.unit, slots, rank)
            training.note_released(rank)
            training.deliver(self.unit, slots, rank)
            self._room -= len(slots)
            self._num_read += len(slots)
            if self._num_read == self._num_slots:
                self.unit, self._num_slots, self._num_read = self.unit + 1, 0, 0

    def _free_room(self) -> int:
        now_s, taken = self._training.run.now_s, self.taken_s
        while taken and taken[0] <= now_s:
            taken.popleft()
            self._room += 1
        return self._room

    def plan_wake_up(self) -> None:
        """Go on once the training has taken enough, if it is known when."""
        wanted = min(self._at_once, self._num_slots - self._num_read) - self._room
        if 0 < wanted <= len(self.taken_s):
            self.waits_for = None
            self._training.run.at(self.taken_s[wanted - 1], self.go_on)

    def describe_wait(self) -> str:
        """What it waits for."""
        return self._training.run.flow.describe_wait(self.unit, self._num_read, self._dp_rank)


class Training:
    """Trains the steps one after the other; all replicas begin a step together, after the update of the one before."""

    def __init__(self, run: VirtualFlow, backbone: Backbone) -> None:
        self.run = run
        self._backbone = backbone
        self.readers = [Reader(self, rank, backbone.prefetch) for rank in range(backbone.num_replicas)]
        self.steps: list[SimulatedStep] = []
        self.lookaheads: list[int] = []
        """Units after each step that miss no part."""
        self.last: tuple[StepWork, Timeline] | None = None
        """The last step that ended."""
        self._optimizer_s = backbone.simulator.optimizer_s()
        self._plans: dict[int, StepPlan] = {}
        self._wanted: set[int] = set()  # units whose plans readers wait for
        self._ready: dict[int, list[list[float]]] = {}  # of units that have not begun: when each slot was read, [dp][K]
        self._delivered: list[tuple[int, tuple[int, ...]]] = []  # (replica, slots) of the running step
        self._running: tuple[StepWork, RunningStep] | None = None
        self._end_s = 0.0
        self._needs: dict[int, DataNeeds] = {}
        self._durations: dict[int, tuple[StepWork, FloatArray, FloatArray]] = {}
        self._ends, self._works, self._encodes = np.zeros((3, backbone.num_steps))

    @property
    def is_over(self) -> bool:
        """Whether all steps are done."""
        return len(self.steps) == self._backbone.num_steps

    def different_steps(self) -> tuple[StepWork, ...]:
        """Return the different steps, at most ``_KEPT``; counted in turn from the first step, the last has its own."""
        assert self.last is not None
        last, others = self.last[0], [step for step, _, _ in self._durations.values() if step is not self.last[0]]
        others.insert((len(self.steps) - 1) % (len(others) + 1), last)
        return tuple(others)

    def start(self) -> None:
        """Let all replicas begin to read."""
        self.run.flow.steps.begin(0)
        for reader in self.readers:
            reader.go_on()

    # --- what readers ask ---------------------------------------------------------------------------------------

    def plan(self, unit: int) -> StepPlan | None:
        """Return a unit's plan; None: the reader waits until it is woken."""
        plan = self._plans.get(unit)
        if plan is None and unit not in self._wanted:
            self._wanted.add(unit)
            self.run.may_plan = True
        return plan

    def note_released(self, dp_rank: int) -> None:
        """Note that the pool may free what a replica has read."""
        self.run.note_released()
        if self.run.flow.microbatches.whole_units:
            self.run.ready_ranks.add(dp_rank)  # of a unit that lost parts, the rest may be complete now

    def deliver(self, unit: int, slots: tuple[int, ...], dp_rank: int) -> None:
        """Take microbatches that a replica has read now."""
        ready = self._ready.get(unit)
        if ready is None:
            self._delivered.append((dp_rank, slots))
        else:
            own, now_s = ready[dp_rank], self.run.now_s
            for slot in slots:
                own[slot] = now_s

    # --- what wakes them ----------------------------------------------------------------------------------------

    def settle(self) -> bool:
        """Do all that can be done now; returns whether anything was."""
        did = self._wake_readers()
        if self._running is None:
            did |= self._begin()
        elif self._delivered:
            did = True
            self._go_on()
        return did

    def _wake_readers(self) -> bool:
        run = self.run
        woken: list[Reader] = []
        if run.may_plan:
            run.may_plan = False
            for plan in self._new_plans():
                waiting = [each for each in self.readers if each.waits_for == "plan" and each.unit == plan.unit.index]
                woken += [each for each in waiting if each.note_plan(plan)]
        if run.all_may_read or run.ready_ranks:
            woken += self._with_data()
            run.all_may_read = False
            run.ready_ranks.clear()
        for reader in woken:
            reader.go_on()
        return bool(woken)

    def _with_data(self) -> list[Reader]:
        """Readers that wait for a microbatch which may be ready now."""
        run, microbatches = self.run, self.run.flow.microbatches
        everyone = run.all_may_read or microbatches.whole_units
        ranks = range(len(self.readers)) if everyone else sorted(run.ready_ranks)
        waiting = [self.readers[rank] for rank in ranks if self.readers[rank].waits_for == "data"]
        if not microbatches.whole_units:
            return waiting
        complete = {unit for unit in {each.unit for each in waiting} if microbatches.is_complete(unit)}
        return [each for each in waiting if each.unit in complete]

    def _new_plans(self) -> list[StepPlan]:
        """Plan the units that readers wait for, as far as that is possible."""
        found = []
        for unit in sorted(self._wanted):
            if self.run.flow.steps.is_past_end(unit):
                continue
            plan = self.run.flow.plan_of(unit)
            self.run.may_feed = True  # in arrival order the window moves with the step that a replica asks for
            if plan is None:
                break
            self._plans[unit] = plan
            self._ready[unit] = [[NOT_YET] * plan.num_slots for _ in range(plan.dp_size)]
            self._wanted.remove(unit)
            found.append(plan)
        return found

    # --- steps --------------------------------------------------------------------------------------------------

    def _begin(self) -> bool:
        unit = len(self.steps)
        plan = self._plans.get(unit)
        if plan is None or self.is_over:
            return False
        step, seconds, transfers = self._work_of(plan)
        needs = self._needs.get(id(step.program))
        if needs is None:
            needs = self._needs[id(step.program)] = DataNeeds.of(step.program)
        running = RunningStep(
            needs,
            seconds,
            transfers,
            begin_s=self._end_s,
            ready_s=np.array(self._ready.pop(unit)),
            buffered=self._backbone.simulator.buffered,
        )
        self._running = step, running
        self._note_taken()
        return True

    def _work_of(self, plan: StepPlan) -> tuple[StepWork, FloatArray, FloatArray]:
        step = self._backbone.step_of(plan)
        found = self._durations.get(id(step))
        if found is None:
            found = step, *self._backbone.simulator.durations(step.program, step.works)
            if len(self._durations) == _KEPT:
                self._durations.clear()
            self._durations[id(step)] = found
        return found

    def _go_on(self) -> None:
        """Give the running step the microbatches that were read now."""
        assert self._running is not None
        read, self._delivered = self._delivered, []
        if self._running[1].deliver(read, self.run.now_s):
            self._note_taken()

    def _note_taken(self) -> None:
        """Note which microbatches are taken, and when; and when the step ends, once all are."""
        assert self._running is not None
        step, running = self._running
        for rank, taken_s in running.newly_taken():
            reader = self.readers[rank]
            reader.taken_s.extend(taken_s)
            if reader.waits_for == "room":
                reader.plan_wake_up()
        if running.timeline.is_done:
            self.run.at(self._end_of(step, running.timeline), self._end)

    def _end_of(self, step: StepWork, timeline: Timeline) -> float:
        index = len(self.steps)
        end_s = timeline.makespan_s + self._optimizer_s
        if step.shared_s:
            self._works[index], self._encodes[index] = step.shared_s, step.shared_encode_s
            lookahead = self._backbone.lookahead
            end_s = max(end_s, shared_end_s(self._ends, self._works, self._encodes, index, lookahead))
        self._ends[index] = end_s
        return end_s

    def _end(self) -> None:
        """End the running step: its positions are consumed, and the window moves."""
        assert self._running is not None
        run, unit, (step, running) = self.run, len(self.steps), self._running
        self._running, self._end_s, self.last = None, run.now_s, (step, running.timeline)
        self.steps.append(SimulatedStep.of(running.begin_s, run.now_s, running.timeline))
        del self._plans[unit]
        run.flow.consume(unit)
        self.lookaheads.append(run.flow.microbatches.num_ready_units)
        run.flow.steps.begin(unit + 1)
        run.may_plan = run.may_feed = True
        run.note_released()
