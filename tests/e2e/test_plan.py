"""What ``flowtrain plan`` saves, ``flowtrain train --plan`` starts: unchanged, through the command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flowtrain.allocator.plan import read_plan
from flowtrain.cli.app import app
from flowtrain.config.load import dump_resolved
from flowtrain.observability.ledger import read_ledger
from flowtrain.observability.run_dir import run_dir
from flowtrain.types.run_plan import ModulePlan
from tests.e2e.worlds import World, tiny_config

pytestmark = pytest.mark.e2e


def test_a_saved_plan_starts_unchanged(tmp_path: Path, ray_cluster: None) -> None:
    world = World(seed=11)
    world.add_mixed(16)
    source = tmp_path / "data.parquet"
    world.write(source)
    # Its own degrees are others: two encoders. The plan's are one of each.
    config = tiny_config(tmp_path, source, "planned", training={"max_steps": 1})
    file, saved = tmp_path / "run.yaml", tmp_path / "plan.yaml"
    file.write_text(dump_resolved(config))
    for command in (
        ["plan", str(file), "--devices", "2", "--save", str(saved)],
        ["train", str(file), "--plan", str(saved)],
    ):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
    plan = read_plan(saved)
    assert plan.encoders["vision"].num_actors == plan.backbone.num_actors == 1
    assert config.encoders["vision"].data_parallel_size == 2
    files = run_dir(config)
    assert plan.feeder == ModulePlan(plan.feeder.data_parallel_size) and 1 <= plan.feeder.data_parallel_size <= 2
    started = read_plan(files.plan)
    assert started.feeder.segment_nbytes > 0, "sized by the data"
    assert replace(started, feeder=plan.feeder) == plan
    assert read_ledger(files.ledger)["position"].to_pylist() == list(range(8))
