"""What ``flowtrain pack`` predicts is what a run does: the same plans, and every position where they put it."""

from __future__ import annotations

from pathlib import Path

import pytest

import flowtrain
from flowtrain.controller.run import run_training
from flowtrain.observability.ledger import read_ledger
from flowtrain.observability.metrics import read_metrics
from flowtrain.observability.run_dir import run_dir
from tests.e2e.worlds import World, tiny_config
from tests.predicted import predicted_plans

pytestmark = pytest.mark.e2e


def test_a_run_makes_the_plans_that_pack_predicted(tmp_path: Path, ray_cluster: None) -> None:
    world = World(seed=11)
    world.add_mixed(24)
    world.add(1, images=[b"no image at all"])  # bad by its header: rejected before it is planned
    world.add(1, images=[world.truncated_image()])  # bad only once it is decoded: planned, and taken out later
    world.add_mixed(4)
    evaluation = World(seed=12)
    evaluation.add_mixed(4)
    config = tiny_config(
        tmp_path,
        world.write(tmp_path / "data.parquet"),
        "predicted",
        data={"eval": {"path": str(evaluation.write(tmp_path / "eval.parquet")), "every_steps": 2, "max_samples": 4}},
        training={"max_steps": 4, "global_batch_size": 10},
        backbone={"data_parallel_size": 2},
    )
    predicted = {step.step: step for step in flowtrain.pack(config).steps}
    expected = {
        position: (plan.unit.step, rank, slot)
        for plan in predicted_plans(config)
        for slot in range(plan.num_slots)
        for rank in range(plan.dp_size)
        for position in plan.microbatch_positions(slot, rank)
    }

    run_training(config)
    files = run_dir(config)
    ran = {record["step"]: record for record in read_metrics(files.metrics)}
    assert sorted(ran) == sorted(predicted) == [1, 2, 3, 4]
    for step, record in ran.items():
        assert record["plan_digest"] == predicted[step].digest
        assert record["num_microbatches"] == predicted[step].num_microbatches
        assert record["packing_fill"] == predicted[step].fill
        assert record["dp_imbalance"] == predicted[step].step_imbalance
    rows = read_ledger(files.ledger).to_pylist()
    assert {
        row["position"]: (row["step"], row["dp_rank"], row["microbatch"]) for row in rows if row["dp_rank"] is not None
    } == expected
    unplanned = {row["position"]: row["state"] for row in rows if row["position"] not in expected}
    assert unplanned and set(unplanned.values()) == {"rejected"}
    assert {row["state"] for row in rows if row["position"] in expected} == {"consumed", "rejected"}
