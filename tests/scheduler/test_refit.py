from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from flowtrain.config.run import RunConfig
from flowtrain.costs.microbatch_costs import FittedCost, MicrobatchCosts
from flowtrain.costs.model_spec import ConnectorSpec, ModelSpec, TransformerSpec
from flowtrain.costs.profile import Profile
from flowtrain.errors import ConfigError
from flowtrain.scheduler.cost import eq3
from flowtrain.scheduler.cost_fit import MIN_ROWS
from flowtrain.scheduler.refit import MAX_ROWS, REFIT_STEPS, WARM_UP_STEPS, CostRefitter
from flowtrain.scheduler.run_cost import configured_costs, first_cost, profiled_model
from flowtrain.types.events import CostFitted
from flowtrain.types.messages import RankReport
from flowtrain.types.plan import CostModel, Microbatch, PlannedSample, StepPlan, Unit, UnitKind

CAPACITY = 1024
TRUE = CostModel("true", per_token=1e-4, per_square=2e-7, constant=0.01)
WAITING_S = 5.0
NUM_SLOTS = 5


class FakePlanner:
    def __init__(self) -> None:
        self.cost = eq3(CAPACITY)


def plan_of(step: int, slots: Sequence[Sequence[Sequence[int]]], kind: UnitKind = UnitKind.TRAIN) -> StepPlan:
    """``slots[k][rank]``: lengths."""
    cost = eq3(CAPACITY)
    rows = [
        [
            Microbatch(k, rank, tuple(PlannedSample(99, length, 0, 1) for length in lengths), cost(lengths))
            for rank, lengths in enumerate(row)
        ]
        for k, row in enumerate(slots)
    ]
    num_samples = sum(len(lengths) for row in slots for lengths in row)
    return StepPlan.of_slots(Unit(step, kind, step, 0, num_samples), CAPACITY, rows, ())


def reports_of(plan: StepPlan, times: Sequence[Sequence[float]], num_rejected: int = 0) -> list[RankReport]:
    """``times[rank][k]``, reported by the last rank first."""
    unit, num_samples = plan.unit, plan.num_samples - num_rejected
    head = (1.0, None, None, num_samples, 100, 10, 0.0, 1.0, 0.0, 0.0)
    return [
        RankReport(unit.index, unit.kind, unit.step, rank, *head, microbatch_s=tuple(seconds))
        for rank, seconds in reversed(list(enumerate(times)))
    ]


def run(refitter: CostRefitter, num_steps: int, true: CostModel = TRUE, first_step: int = 1) -> list[CostFitted]:
    """Two ranks; in each slot, the cheaper one waits longer than the other computes."""
    rng = np.random.default_rng(first_step)
    events: list[CostFitted] = []
    for step in range(first_step, first_step + num_steps):
        slots, times = [], []
        for _ in range(NUM_SLOTS):
            costly = rng.integers(100, CAPACITY // 2, 2).tolist()
            pair = [costly, [min(costly) // 2]]
            seconds = [true(costly), WAITING_S]
            flip = bool(rng.integers(2))
            slots.append(pair[::-1] if flip else pair)
            times.append(seconds[::-1] if flip else seconds)
        plan = plan_of(step, slots)
        events.extend(refitter.take(plan, reports_of(plan, list(zip(*times, strict=True)))))
    return events


def test_costs_are_refitted_every_so_often_once_there_is_enough() -> None:
    planner = FakePlanner()
    refitter = CostRefitter(planner)
    assert (REFIT_STEPS - WARM_UP_STEPS) * NUM_SLOTS >= MIN_ROWS, "or the first refit is later"
    assert run(refitter, REFIT_STEPS - 1) == [] and planner.cost == eq3(CAPACITY)
    (event,) = run(refitter, 1, first_step=REFIT_STEPS)
    assert event.in_use and event.step == REFIT_STEPS and event.num_rows <= (REFIT_STEPS - WARM_UP_STEPS) * NUM_SLOTS
    assert planner.cost == event.cost != eq3(CAPACITY)
    assert planner.cost.per_token == pytest.approx(TRUE.per_token, rel=1e-6), "only the costliest of a slot may count"
    assert planner.cost.per_square == pytest.approx(TRUE.per_square, rel=1e-6)
    assert event.form == "squares" and event.r2 == pytest.approx(1.0)


def test_a_run_with_frozen_costs_only_tells_what_it_measured() -> None:
    refitter = CostRefitter()
    assert run(refitter, 4 * REFIT_STEPS) == []
    (event,) = refitter.fitted(64)
    assert not event.in_use and event.step == 64 and event.cost.per_token == pytest.approx(TRUE.per_token, rel=1e-6)


def test_old_measurements_give_way_to_new_ones() -> None:
    refitter = CostRefitter()
    slower = dataclasses.replace(TRUE, per_token=3 * TRUE.per_token)
    run(refitter, 100)
    run(refitter, MAX_ROWS // NUM_SLOTS + 1, slower, first_step=101)
    (event,) = refitter.fitted(0)
    assert event.num_rows <= MAX_ROWS
    assert event.cost.per_token == pytest.approx(slower.per_token, rel=1e-6)


def test_what_was_not_measured_as_planned_is_left_out() -> None:
    refitter = CostRefitter()
    assert run(refitter, WARM_UP_STEPS + MIN_ROWS) == [] and refitter.fitted(1)
    refitter = CostRefitter()
    run(refitter, WARM_UP_STEPS)
    lengths = [[[100 + 10 * k], []] for k in range(NUM_SLOTS)]
    seconds = [[TRUE(pair[0]) for pair in lengths], [0.0] * NUM_SLOTS]
    for step in range(MIN_ROWS):
        evaluation = plan_of(step, lengths, UnitKind.EVAL)
        refitter.take(evaluation, reports_of(evaluation, seconds))
        plan = plan_of(step, lengths)
        refitter.take(plan, reports_of(plan, seconds, num_rejected=1))
        refitter.take(plan, reports_of(plan, [[], []]))
        empty = plan_of(step, [[[], []]])
        refitter.take(empty, reports_of(empty, [[1.0], [1.0]]))
    assert refitter.fitted(1) == ()
    for step in range(MIN_ROWS):
        plan = plan_of(step, lengths)
        refitter.take(plan, reports_of(plan, seconds))
    assert refitter.fitted(1)


# --- the cost that a run starts with ---------------------------------------------------------------------------------

SPEC = ModelSpec({}, ConnectorSpec(8, 16, 16), TransformerSpec(2, 16, 32, 4, 2, 4, 128))


def config_of(**scheduler: str | int | None) -> RunConfig:
    order = scheduler.pop("order", "deterministic")
    return RunConfig.model_validate(
        {
            "name": "kite",
            "encoders": {"vision": {"path": "tower"}},
            "backbone": {"path": "model"},
            "data": {"sources": [{"path": "x"}], "max_seq_len": 512, "order": order},
            "scheduler": {"microbatch_tokens": CAPACITY, **scheduler},
        }
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    fitted = FittedCost(TRUE, "squares", 0.97, 0.9, 200)
    costs = MicrobatchCosts(fitted, profiled_model(config_of(), SPEC), CAPACITY)
    path = tmp_path / "profile.json"
    path.write_text(Profile("cpu", {}, {}, microbatches=costs).to_json())
    return path


@pytest.mark.parametrize("order", ["deterministic", "arrival"])
def test_a_run_starts_with_its_file(file: Path, order: str) -> None:
    config = config_of(cost="profile", cost_profile=str(file), order=order)
    profile = configured_costs(config, SPEC)
    assert first_cost(config, SPEC, profile) == TRUE
    assert configured_costs(config_of(cost="eq3", cost_profile=str(file)), SPEC) is None


def test_arrival_starts_with_eq3_and_a_frozen_cost_needs_a_file() -> None:
    config = config_of(cost="profile", order="arrival")
    assert configured_costs(config, SPEC) is None and first_cost(config, SPEC) == eq3(CAPACITY)
    with pytest.raises(ValueError, match=r"needs scheduler.cost_profile with data.order \('deterministic'\)"):
        config_of(cost="profile")


def test_flops_know_the_model_and_what_is_frozen() -> None:
    cost = first_cost(config_of(cost="flops"), SPEC)
    assert cost.name == "flops" and cost.per_square > 0.0
    frozen = config_of(cost="flops").model_copy(
        update={"model": config_of().model.model_copy(update={"freeze": ("backbone",)})}
    )
    assert first_cost(frozen, SPEC).per_token < cost.per_token


def test_a_file_of_another_model_is_refused(file: Path) -> None:
    wider = dataclasses.replace(SPEC, backbone=dataclasses.replace(SPEC.backbone, hidden_size=32))
    with pytest.raises(ConfigError, match=r"model.backbone.hidden_size is 16 there and 32 in this run"):
        configured_costs(config_of(cost="profile", cost_profile=str(file)), wider)
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {"schema": 99}))
    with pytest.raises(ConfigError, match="schema is 99"):
        configured_costs(config_of(cost="profile", cost_profile=str(file)), SPEC)
