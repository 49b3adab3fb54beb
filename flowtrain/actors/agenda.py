"""The run's units on their way from the feeder to the backbone: to be sized, sized, planned, done."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from flowtrain.actors.order import Order, SamplerState
from flowtrain.costs.flops import SampleFlops
from flowtrain.mempool.directory import Directory
from flowtrain.scheduler.sample_sizes import SampleSizes
from flowtrain.scheduler.step_planner import StepPlanner
from flowtrain.types.plan import StepPlan, Unit
from flowtrain.types.samples import SizedSample

FlopsOf = Callable[[SampleSizes], SampleFlops]


@dataclass(frozen=True)
class Planned:
    """A unit that was planned. When, in seconds since the Unix epoch; flops: of its samples."""

    plan: StepPlan
    started_s: float
    finished_s: float
    flops: SampleFlops


class Agenda:
    """Which unit is sized next, and what the sized ones run.

    units: those of the run in order. leftovers: units done in an earlier run of whose own positions some are left
    (``arrival`` order); they are sized first. lookahead: units between the one that the backbone works on, or whose
    plan it waits for, and the last that may be sized.
    """

    def __init__(
        self,
        *,
        units: Iterator[Unit],
        leftovers: Iterable[Unit] = (),
        lookahead: int,
        order: Order,
        planner: StepPlanner,
        directory: Directory,
        flops_of: FlopsOf,
    ) -> None:
        first = next(units, None)
        self._units = units
        self._upcoming = deque([*leftovers, first] if first is not None else [])
        self._current = first.index if first is not None else 0
        self._asked = self._current
        self._lookahead = lookahead
        self._order = order
        self._planner = planner
        self._directory = directory
        self._flops_of = flops_of
        self._planned: dict[int, Planned] = {}
        self.last_step = first.step - 1 if first is not None else 0
        """Steps done so far."""
        self.unfinished: dict[int, Unit] = {}
        """Units that are sized and not done, by index."""

    @property
    def upcoming(self) -> Unit | None:
        """The unit that is sized next, or None past the end."""
        if not self._upcoming and (unit := next(self._units, None)) is not None:
            self._upcoming.append(unit)
        return self._upcoming[0] if self._upcoming else None

    def is_near(self, unit: Unit) -> bool:
        """Whether a unit lies within the lookahead."""
        return unit.index <= max(self._current, self._asked) + self._lookahead

    def add_sized(self, unit: Unit, samples: Sequence[SizedSample], sampler_state: SamplerState) -> Planned | None:
        """Take in the upcoming unit with its samples that are not rejected; plan it if its turn is now."""
        started = time.time()
        upcoming = self._upcoming.popleft()
        assert unit == upcoming, f"unit {unit} was reported, not {upcoming}"
        self._order.add(unit, samples, sampler_state)
        if unit.index < self._current:
            return None  # a leftover: its positions run in the steps to come
        self.unfinished[unit.index] = unit
        return self._plan(unit, started) if self._order.is_planned_at_once(unit) else None

    def is_unplanned(self, unit_index: int) -> bool:
        """Whether a unit is sized and waits for being planned."""
        return unit_index in self.unfinished and unit_index not in self._planned

    def plan(self, unit_index: int) -> Planned | None:
        """Plan a unit for which ``is_unplanned`` holds if it can be planned now; what is sized moves on with it."""
        self._asked = unit_index
        return self._plan(self.unfinished[unit_index], time.time())

    def plan_of(self, unit_index: int) -> StepPlan | None:
        """The plan of a unit, or None while it has none."""
        planned = self._planned.get(unit_index)
        return planned.plan if planned is not None else None

    def finish(self, unit_index: int) -> tuple[Planned, SamplerState]:
        """A unit was consumed: forget it. Returns what it was, and where a run goes on behind it."""
        planned = self._planned.pop(unit_index)
        del self.unfinished[unit_index]
        self._current = unit_index + 1
        self.last_step = planned.plan.unit.step
        return planned, self._order.state_behind(planned.plan.unit)

    def describe_wait(self, unit_index: int) -> str:
        """Say why a unit has no plan."""
        unit, upcoming = self.unfinished.get(unit_index), self.upcoming
        reason = f", which waits for {self._order.describe_wait(unit)}" if unit is not None else ""
        feeder = f"the feeder is to size unit {upcoming.index}" if upcoming is not None else "all units are sized"
        return f"unit {unit_index} is not planned yet{reason}; {feeder}"

    def _plan(self, unit: Unit, started: float) -> Planned | None:
        chosen = self._order.choose(unit)
        if chosen is None:
            return None
        unit, samples = chosen
        sizes = self._planner.sizes_of(samples)
        plan = self._planner.plan(unit, sizes)
        finished = time.time()
        self._directory.add_plan(plan)
        planned = self._planned[unit.index] = Planned(plan, started, finished, self._flops_of(sizes))
        return planned
