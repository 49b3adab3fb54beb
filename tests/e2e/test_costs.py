"""Costs that are measured while a run trains: refitted in ``arrival``, frozen in ``deterministic``."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from flowtrain.actors.backbone import BackboneRank
from flowtrain.config.run import RunConfig
from flowtrain.controller.run import run_training
from flowtrain.controller.worker_group import ActorClasses
from flowtrain.observability.run_dir import run_dir
from flowtrain.scheduler.cost import eq3
from flowtrain.scheduler.refit import REFIT_STEPS
from flowtrain.scheduler.run_cost import read_microbatch_costs
from flowtrain.training.checkpoint_store import latest_complete, read_meta
from flowtrain.types.plan import CostModel
from tests.e2e.worlds import World, tiny_config

pytestmark = pytest.mark.e2e

TRUE = CostModel("true", per_token=2e-4, per_square=3e-6, constant=0.01)
CAPACITY = 128


class TimedRank(BackboneRank):
    """Notes the costs of each plan with its lengths, and reports the times of a backbone whose costs are known."""

    def _report(self, plan, result, started, microbatch_s, *rest) -> bool:  # type: ignore[no-untyped-def]
        assert len(microbatch_s) == plan.num_slots and all(0.0 < seconds < 60.0 for seconds in microbatch_s)
        lengths = [plan.microbatch_lengths(slot, self._dp_rank) for slot in range(plan.num_slots)]
        with (Path(self._config.runs_dir) / f"{self._config.name}-plans").open("a") as file:
            file.write(json.dumps({"step": plan.unit.step, "lengths": lengths, "costs": plan.costs}) + "\n")
        return super()._report(plan, result, started, tuple(TRUE(each) for each in lengths), *rest)


def plans_of(config: RunConfig) -> list[dict[str, Any]]:
    path = Path(config.runs_dir) / f"{config.name}-plans"
    return [json.loads(line) for line in path.read_text().splitlines()]


def is_planned_with(plan: dict[str, Any], cost: CostModel) -> bool:
    return plan["costs"] == pytest.approx([cost(lengths) for lengths in plan["lengths"]], rel=1e-6)


def checkpointed_cost(config: RunConfig) -> CostModel:
    checkpoint = latest_complete(run_dir(config).checkpoints)
    assert checkpoint is not None
    return CostModel(**read_meta(checkpoint).state["cost"])


def test_costs_are_refitted_in_arrival_and_frozen_in_deterministic(
    tmp_path: Path, ray_cluster: None, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    world.add_mixed(64)
    data = world.write(tmp_path / "data.parquet")
    ranks = ActorClasses(backbone=TimedRank)

    config = tiny_config(
        tmp_path,
        data,
        "refitted",
        "scheduler.cost=profile",
        "data.order=arrival",
        training={"max_steps": REFIT_STEPS + 4, "global_batch_size": 16},
    )
    summary = run_training(config, classes=ranks)
    plans = plans_of(config)
    assert is_planned_with(plans[0], eq3(CAPACITY)) and is_planned_with(plans[-1], TRUE)
    refit = next(plan["step"] for plan in plans if is_planned_with(plan, TRUE))
    assert refit > REFIT_STEPS, "the step behind the refit is the first that can have it"
    costs = read_microbatch_costs(str(run_dir(config).profile))
    assert costs.fitted.form == "squares" and costs.fitted.r2 == pytest.approx(1.0)
    assert summary.cost_r2 == costs.fitted.r2
    assert checkpointed_cost(config).per_square == pytest.approx(TRUE.per_square)

    file = tmp_path / "measured.json"
    file.write_text(run_dir(config).profile.read_text())
    frozen = tiny_config(
        tmp_path, data, "frozen", "scheduler.cost=profile", f"scheduler.cost_profile={file}", training={"max_steps": 2}
    )
    run_training(frozen, classes=ranks)
    assert all(is_planned_with(plan, TRUE) for plan in plans_of(frozen))
    values = json.loads(file.read_text())
    values["microbatches"]["fitted"]["model"]["per_token"] *= 7.0
    file.write_text(json.dumps(values))
    longer = frozen.model_copy(update={"training": frozen.training.model_copy(update={"max_steps": 4})})
    with caplog.at_level(logging.WARNING):
        run_training(longer, resume=True, classes=ranks)
    assert [plan["step"] for plan in plans_of(frozen)] == [1, 2, 3, 4]
    assert all(is_planned_with(plan, TRUE) for plan in plans_of(frozen)), "the checkpoint's cost holds, not the file's"
    assert checkpointed_cost(frozen).per_token == pytest.approx(TRUE.per_token, rel=1e-6)
    assert "steps are planned with the checkpoint's cost" in caplog.text
