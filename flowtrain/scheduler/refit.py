"""Costs measured while a run trains: from plans and the ranks' times to a fitted cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from flowtrain.costs.microbatch_costs import FittedCost
from flowtrain.scheduler.cost_fit import Measured, fit_cost
from flowtrain.types.events import CostFitted
from flowtrain.types.messages import RankReport
from flowtrain.types.plan import CostModel, StepPlan, UnitKind

MAX_ROWS = 4096
"""Most measured microbatches that are kept: the latest ones."""

REFIT_STEPS = 16
"""Training steps between refits while running (``data.order: arrival`` with ``scheduler.cost: profile``)."""

WARM_UP_STEPS = 2
"""The first training steps after a start are not measured: they also allocate and compile."""


class Planner(Protocol):
    """An object that plans with a cost; the next plan uses the cost that was set last."""

    cost: CostModel


class CostRefitter:
    """Collects the times of microbatches, and fits costs to them.

    A slot gives one row: its costliest microbatch by the plan, with the time of the rank that ran it. Ranks wait for
    each other in the collectives of forward and backward, and an accelerator's time includes this waiting. The
    costliest microbatch waits least and decides the slot's time. The reduction of the gradients lies in each step's
    last slot and is not subtracted.
    """

    def __init__(self, planner: Planner | None = None) -> None:
        """planner: receives a fitted cost every ``REFIT_STEPS`` training steps; None: the run's cost is frozen."""
        self._planner = planner
        self._rows: deque[Measured] = deque(maxlen=MAX_ROWS)
        self._num_steps = 0

    def take(self, plan: StepPlan, reports: Sequence[RankReport]) -> tuple[CostFitted, ...]:
        """Add a finished unit with one report per replica; returns the event of a refit, or nothing."""
        if plan.unit.kind is not UnitKind.TRAIN:
            return ()
        self._num_steps += 1
        if self._num_steps > WARM_UP_STEPS:
            self._rows.extend(_rows(plan, reports))
        if self._planner is None or self._num_steps % REFIT_STEPS:
            return ()
        fitted = fit_cost(self._rows)
        if fitted is None:
            return ()
        self._planner.cost = fitted.model
        return (_event(fitted, plan.unit.step, in_use=True),)

    def fitted(self, step: int) -> tuple[CostFitted, ...]:
        """Return the fit to the rows kept after ``step``, for the record only; empty if ``fit_cost`` returns None."""
        fitted = fit_cost(self._rows)
        return (_event(fitted, step, in_use=False),) if fitted is not None else ()


def _rows(plan: StepPlan, reports: Sequence[RankReport]) -> list[Measured]:
    """One row per slot; none if samples were rejected after planning, because then the planned lengths do not hold."""
    if any(report.num_samples != plan.num_samples or len(report.microbatch_s) != plan.num_slots for report in reports):
        return []
    seconds = {report.dp_rank: report.microbatch_s for report in reports}
    rows = []
    for slot in range(plan.num_slots):
        costs = plan.costs[slot * plan.dp_size : (slot + 1) * plan.dp_size]
        rank = costs.index(max(costs))
        lengths = plan.microbatch_lengths(slot, rank)
        if lengths:
            squares = sum(length**2 for length in lengths)
            rows.append(Measured(sum(lengths), max(lengths), squares, seconds[rank][slot]))
    return rows


def _event(fitted: FittedCost, step: int, in_use: bool) -> CostFitted:
    return CostFitted(
        step=step,
        cost=fitted.model,
        form=fitted.form,
        r2=fitted.r2,
        other_r2=fitted.other_r2,
        num_rows=fitted.num_rows,
        in_use=in_use,
    )
