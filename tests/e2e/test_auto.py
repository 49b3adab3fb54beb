"""``mode: auto`` starts what it prints, and a run that goes on keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from flowtrain.allocator.plan import read_plan
from flowtrain.cli.app import app
from flowtrain.config.load import dump_resolved
from flowtrain.observability.ledger import read_ledger
from flowtrain.observability.run_dir import run_dir
from tests.e2e.disturbed import json_lines
from tests.e2e.worlds import World, tiny_config
from tests.profiles import write_cpu_profile

pytestmark = pytest.mark.e2e

BATCH, NUM_STEPS = 8, 2


def train(*arguments: str) -> Result:
    result = CliRunner(env={"COLUMNS": "100"}).invoke(app, ["train", *arguments])
    assert result.exit_code == 0, result.output
    return result


def test_auto_starts_what_it_prints_and_goes_on_with_it(tmp_path: Path, ray_cluster: None) -> None:
    world = World(seed=5)
    world.add_mixed(32)
    source, profile = world.write(tmp_path / "data.parquet"), tmp_path / "profile.json"
    config = tiny_config(
        tmp_path, source, "auto", "mode=auto", f"allocator.profile={profile}", training={"max_steps": NUM_STEPS}
    )
    write_cpu_profile(profile, config)
    file, files = tmp_path / "run.yaml", run_dir(config)
    file.write_text(dump_resolved(config))

    foreseen = train(str(file), "--dry-run", "--devices", "1").stdout
    assert "for 1 cpu of this machine" in foreseen and not files.root.exists()

    shown = train(str(file), "training.max_steps=1").stdout
    assert "for 4 cpu of this machine" in shown and f"rates from {profile}" in " ".join(shown.split())
    (starts,) = [line for line in shown.splitlines() if line.startswith("starts")]
    plan = read_plan(files.plan)
    assert starts.split()[1] == f"{plan.mode}:"
    for mode in ("decoupled", "colocated", "monolithic", "disaggregated"):
        assert f"\n {mode} " in shown
    assert plan.backbone_settings is not None, "which auto chooses too"
    started = files.load_config()
    assert (started.mode, started.allocator.choose) == (plan.mode, "auto")
    assert started.scheduler.microbatch_tokens == plan.backbone_settings.microbatch_tokens

    profile.unlink()  # nothing is chosen anew
    train(str(file), "--resume")
    assert read_plan(files.plan) == plan and files.load_config().mode == plan.mode
    assert [line["step"] for line in json_lines(files.metrics)] == list(range(1, NUM_STEPS + 1))
    ledger = read_ledger(files.ledger).to_pylist()
    assert [row["position"] for row in ledger] == list(range(NUM_STEPS * BATCH))
    assert all(row["state"] == "consumed" for row in ledger)
    assert files.trace.is_file()
