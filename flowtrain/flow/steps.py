"""The run's units: which is sized next, what each one runs, which may begin, and where the run ends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from flowtrain.costs.flops import SampleFlops
from flowtrain.flow.microbatches import Microbatches
from flowtrain.flow.order import Order
from flowtrain.scheduler.refit import Planner
from flowtrain.scheduler.sample_sizes import SampleSizes
from flowtrain.types.plan import CostModel, StepPlan, Unit, UnitKind
from flowtrain.types.samples import SamplerState, SizedSample

FlopsOf = Callable[[SampleSizes], SampleFlops]


class UnitPlanner(Planner, Protocol):
    """Packs units, as ``StepPlanner`` does."""

    def sizes_of(self, samples: Sequence[SizedSample]) -> SampleSizes:
        """Return the columns that ``plan`` works on, from sized samples in any order."""

    def is_searched(self, unit: Unit, sizes: SampleSizes) -> bool:
        """Whether ``plan`` searches an arrangement of the unit, which takes long."""

    def plan(self, unit: Unit, samples: SampleSizes, *, may_search: bool = True) -> StepPlan:
        """Plan one unit from its samples without the rejected ones. may_search: False: without a search."""


@dataclass(frozen=True, slots=True)
class MadePlan:
    """A plan that another process made, and when it began and ended, on the node's monotonic clock."""

    plan: StepPlan
    started_s: float
    finished_s: float


@dataclass(frozen=True, slots=True)
class Search:
    """A plan that another process makes. limit_s: the longest that the unit waits for it; None: until it ends."""

    unit_index: int
    future: Future[MadePlan]
    limit_s: float | None = None


class Elsewhere(Protocol):
    """Makes plans in other processes."""

    def plan(self, unit: Unit, sizes: SampleSizes, cost: CostModel) -> Search:
        """Begin to plan a unit, as a planner with this cost does."""


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    """A unit that was planned."""

    plan: StepPlan
    started_s: float
    """Start of planning, on the monotonic clock."""
    finished_s: float
    """End of planning, on the monotonic clock."""
    flops: SampleFlops
    """Model FLOPs of its samples."""
    waited_s: float
    """Seconds from a replica's question, or from the start if that is later, until the plan was there."""


@dataclass(slots=True)
class _Unplanned:
    """A unit that is planned after those before it."""

    unit: Unit
    sizes: SampleSizes
    started_s: float
    search: Search | None
    may_search: bool = True
    """Whether it may still be searched here."""


class Steps:
    """Keeps the units of a run. All replicas get the same plan and answer for a unit, also when the user stops the run.

    units: the run's units, in order.
    leftovers: units that an earlier run has done without consuming all their own positions (``arrival`` order); they
        are sized first.
    lookahead: units that may be sized after the one that the backbone works on, or whose plan it waits for.
    order: decides which positions a unit runs, and when it is planned.
    planner: packs a unit's samples into microbatches.
    elsewhere: makes the plans that need a search; None: the planner makes them. Both make the same ones.
    microbatches: takes in the plans.
    flops_of: counts the FLOPs of a unit's samples.
    """

    def __init__(
        self,
        *,
        units: Iterator[Unit],
        leftovers: Iterable[Unit] = (),
        lookahead: int,
        order: Order,
        planner: UnitPlanner,
        microbatches: Microbatches,
        flops_of: FlopsOf,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        first = next(units, None)
        self._units = units
        self._upcoming = deque([*leftovers, first] if first is not None else [])
        self._current = first.index if first is not None else 0
        self._asked = self._current
        self._begun = -1
        self._lookahead = lookahead
        self._order = order
        self._planner = planner
        self._microbatches = microbatches
        self._flops_of = flops_of
        self.elsewhere = elsewhere
        self._unplanned: deque[_Unplanned] = deque()
        self._searches: list[Search] = []  # that nobody follows yet
        self._asked_s: dict[int, float] = {}  # when a replica asked first, by unit
        self._unfinished: dict[int, Unit] = {}  # sized and not done, by index
        self._planned: dict[int, PlannedUnit] = {}
        self._stop_requested = False
        self._stop_at: int | None = None
        self.num_done = first.step - 1 if first is not None else 0
        """Training steps done so far."""

    # --- sizing and planning ------------------------------------------------------------------------------------

    def upcoming(self, number: int = 0) -> Unit | None:
        """Return the unit that is sized next, or after ``number`` others; None past the end."""
        while len(self._upcoming) <= number:
            unit = next(self._units, None)
            if unit is None:
                return None
            self._upcoming.append(unit)
        return self._upcoming[number]

    def may_size(self, unit: Unit) -> bool:
        """Whether a unit may be sized now: if it is within the lookahead; in a run that stops, only if it was begun."""
        if self._stop_requested:
            return unit.index <= self._begun
        return unit.index <= max(self._current, self._asked) + self._lookahead

    def is_turn_to_encode(self, unit_index: int) -> bool:
        """Whether the backbone has read all units before this one."""
        return all(map(self._microbatches.is_read, range(self._current, unit_index)))

    def add_sized(
        self, unit: Unit, samples: Sequence[SizedSample], sampler_state: SamplerState
    ) -> tuple[PlannedUnit, ...]:
        """Take in the upcoming unit without its rejected samples. Returns the plans that are there now."""
        started = time.monotonic()
        upcoming = self._upcoming.popleft()
        assert unit == upcoming, f"unit {unit} was reported, not {upcoming}"
        self._order.add(unit, samples, sampler_state)
        if unit.index < self._current:
            return ()  # a leftover: its positions run in later steps
        self._unfinished[unit.index] = unit
        return self._plan(unit, started) if self._order.is_planned_at_once(unit) else ()

    def plan_now(self, unit_index: int) -> tuple[PlannedUnit, ...]:
        """Plan a sized unit that a replica asks for, if enough is ready. From now on the lookahead counts from it."""
        if unit_index in self._planned:
            return ()
        now_s = time.monotonic()
        self._asked_s.setdefault(unit_index, now_s)
        if any(each.unit.index == unit_index for each in self._unplanned):
            return self.take_plans()
        if unit_index not in self._unfinished:
            return ()
        self._asked = unit_index
        return self._plan(self._unfinished[unit_index], now_s)

    def take_searches(self) -> tuple[Search, ...]:
        """Return the searches that began since the last call; when one ends, ``take_plans`` is to be called."""
        found, self._searches = tuple(self._searches), []
        return found

    def give_up(self, search: Search) -> None:
        """Let a unit wait for its search no longer; it is arranged without one."""
        for each in self._unplanned:
            if each.search is search:
                each.search, each.may_search = None, False

    def take_plans(self) -> tuple[PlannedUnit, ...]:
        """Take in what is planned by now, unit by unit: leases follow positions, so no plan overtakes another."""
        found = []
        while self._unplanned and (made := self._made(self._unplanned[0])) is not None:
            each, now_s = self._unplanned.popleft(), time.monotonic()
            self._microbatches.add(made.plan)
            index = each.unit.index
            asked_s = self._asked_s.pop(index, now_s)
            waited_s = now_s - max(asked_s, each.started_s)
            flops = self._flops_of(each.sizes)
            planned = PlannedUnit(made.plan, made.started_s, made.finished_s, flops, max(waited_s, 0.0))
            self._planned[index] = planned
            found.append(planned)
        return tuple(found)

    def plan_of(self, unit_index: int) -> StepPlan | None:
        """Return the plan of a unit, or None while it has none."""
        planned = self._planned.get(unit_index)
        return planned.plan if planned is not None else None

    def finish(self, unit_index: int) -> tuple[PlannedUnit, SamplerState]:
        """Forget a consumed unit. Returns its plan, and the state from which a run continues after it."""
        planned = self._planned.pop(unit_index)
        del self._unfinished[unit_index]
        self._current = unit_index + 1
        self.num_done = planned.plan.unit.step
        return planned, self._order.state_after(planned.plan.unit)

    # --- where the run ends -------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """End the run after the running step and the evaluation that may follow it."""
        self._stop_requested = True

    @property
    def is_stopping(self) -> bool:
        """Whether the user has asked for the end."""
        return self._stop_requested

    def begin(self, unit_index: int) -> bool:
        """Let a replica run a unit; False: stop."""
        if self.has_begun(unit_index):
            return True
        # An evaluation round belongs to the step before it: a resumed run starts after both.
        if self._stop_requested and self._stop_at is None and self._kind_of(unit_index) is not UnitKind.EVAL:
            self._stop_at = unit_index
        if self.is_past_end(unit_index):
            return False
        self._begun = unit_index
        return True

    def has_begun(self, unit_index: int) -> bool:
        """Whether a replica runs a unit, or a later one."""
        return unit_index <= self._begun

    def is_past_end(self, unit_index: int) -> bool:
        """Whether a unit that no replica began will never come: the run was stopped, or has no more units."""
        if self._stop_at is not None:
            return unit_index >= self._stop_at
        return self.upcoming() is None and unit_index not in self._unfinished

    @property
    def are_over(self) -> bool:
        """Whether producers have nothing left to do: the backbone stopped, or all units are done."""
        if self._stop_at is not None:
            return not any(unit_index < self._stop_at for unit_index in self._unfinished)
        return self.upcoming() is None and not self._unfinished

    # --- for the trace ------------------------------------------------------------------------------------------

    @property
    def next_step(self) -> int:
        """The first training step that no replica has begun."""
        begun = self._unfinished.get(self._begun)
        return (begun.step if begun is not None else self.num_done) + 1

    @property
    def num_sized_ahead(self) -> int:
        """Units that are sized, after the one that the backbone works on or waits for."""
        return sum(unit_index > self._current for unit_index in self._unfinished)

    @property
    def num_encoded_ahead(self) -> int:
        """Those of them that are planned and miss no part."""
        return sum(self._microbatches.is_complete(index) for index in self._planned if index > self._current)

    def describe_wait(self, unit_index: int) -> str:
        """Return why a unit has no plan."""
        if any(each.unit.index == unit_index and each.search is not None for each in self._unplanned):
            return f"unit {unit_index} is not planned yet: its arrangement is searched"
        unit, upcoming = self._unfinished.get(unit_index), self.upcoming()
        reason = f", which waits for {self._order.describe_wait(unit)}" if unit is not None else ""
        feeder = f"feeders size unit {upcoming.index} next" if upcoming is not None else "all units are sized"
        return f"unit {unit_index} is not planned yet{reason}; {feeder}"

    def _kind_of(self, unit_index: int) -> UnitKind | None:
        """Return the kind of the unit that begins next; None past the end."""
        unit = self._unfinished.get(unit_index) or self.upcoming()
        return unit.kind if unit is not None else None

    def _plan(self, unit: Unit, started_s: float) -> tuple[PlannedUnit, ...]:
        chosen = self._order.choose(unit)
        if chosen is None:
            return ()
        unit, samples = chosen
        sizes, search = self._planner.sizes_of(samples), None
        if self.elsewhere is not None and self._planner.is_searched(unit, sizes):
            search = self.elsewhere.plan(unit, sizes, self._planner.cost)
            self._searches.append(search)
        self._unplanned.append(_Unplanned(unit, sizes, started_s, search))
        return self.take_plans()

    def _made(self, each: _Unplanned) -> MadePlan | None:
        """Return a unit's plan; None while it is searched."""
        started_s = each.started_s
        if each.search is not None:
            if not each.search.future.done():
                return None
            if each.search.future.exception() is None:
                return each.search.future.result()
            started_s = time.monotonic()  # the process was lost: the same plan is made here
        plan = self._planner.plan(each.unit, each.sizes, may_search=each.may_search)
        return MadePlan(plan, started_s, time.monotonic())
