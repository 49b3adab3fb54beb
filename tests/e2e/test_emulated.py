"""Runs on emulated devices through the real controller: every position is consumed, and nothing is trained."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowtrain.config.load import override_config
from flowtrain.config.run import RunConfig
from flowtrain.controller.emulated import actor_classes
from flowtrain.controller.export import export_run
from flowtrain.controller.predict import run_workload
from flowtrain.controller.run import run_training
from flowtrain.emulation.rank import EmulatedRank
from flowtrain.errors import CheckpointError, ConfigError, WorkerLostError
from flowtrain.observability.ledger import read_ledger
from flowtrain.observability.report.build import ReportOptions, build_report
from flowtrain.observability.run_dir import run_dir
from tests.e2e.disturbed import json_lines
from tests.e2e.worlds import World, tiny_config

pytestmark = pytest.mark.e2e

BATCH, NUM_STEPS, NUM_EVAL = 8, 3, 4
MODES: dict[str, tuple[str, ...]] = {
    "decoupled": ("encoders.vision.data_parallel_size=1", "encoders.vision.tensor_parallel_size=2"),
    "colocated": ("backbone.pipeline_parallel_size=2", "emulated.ranks_per_process=2"),
    "monolithic": (
        "backbone.pipeline_parallel_size=2",
        "backbone.sharding=full",
        "backbone.activation_checkpointing=adaptive",
        "pipeline.encoder_layers=mixed",
        "pipeline.partition=balanced",
    ),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("emulated")
    for name, count in (("data", BATCH * NUM_STEPS), ("eval", NUM_EVAL)):
        world = World(seed=count)
        world.add_mixed(count)
        world.write(directory / f"{name}.parquet")
    return directory


def config_of(data: Path, mode: str) -> RunConfig:
    return tiny_config(
        data,
        data / "data.parquet",
        f"emulated-{mode}",
        f"mode={mode}",
        *MODES[mode],
        model={"device": "emulated", "family": "variable_llava"},
        emulated={"device": "a100"},
        backbone={"data_parallel_size": 2, "num_cpus": 1.0},
        data={"eval": {"path": str(data / "eval.parquet"), "every_steps": 2, "max_samples": NUM_EVAL}},
        training={"global_batch_size": BATCH, "max_steps": NUM_STEPS},
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_consumes_every_position_once(data: Path, ray_cluster: None, mode: str) -> None:
    config = config_of(data, mode)
    summary = run_training(config)
    assert (summary.step, summary.loss, summary.checkpoint) == (NUM_STEPS, 0.0, None)
    assert summary.emulated is not None and "a100" in summary.emulated
    metrics = json_lines(run_dir(config).metrics)
    assert [line["emulated"] for line in metrics] == ["emulated a100"] * NUM_STEPS
    assert all(line["host_s"] > 0.0 and line["mfu"] > 0.0 for line in metrics)
    assert [line["plan_digest"] for line in metrics] == [each.digest for each in run_workload(config).predictions]
    ledger = read_ledger(run_dir(config).ledger).to_pylist()
    assert [row["position"] for row in ledger] == list(range(BATCH * NUM_STEPS))
    assert all(row["state"] == "consumed" for row in ledger)
    page = build_report([run_dir(config).root], ReportOptions(thumbnails=False))
    assert ">Timeline<" in page and "emulated a100" in page and ">Learning<" not in page
    with pytest.raises(ConfigError, match=r"--resume .* 'emulated' there is none"):
        run_training(config, resume=True)
    with pytest.raises(CheckpointError, match="no weights exist and nothing can be exported"):
        export_run(run_dir(config).root)


class FailsAtWork(EmulatedRank):
    """The second replica's first rank fails with its first unit; all others wait for it."""

    def _run_unit(self, *args: Any) -> tuple[int, bool]:
        if self._rank == 1:
            raise ValueError("the cause")
        return super()._run_unit(*args)


def test_a_rank_that_fails_ends_the_run_with_its_own_error(data: Path, ray_cluster: None) -> None:
    names = ("name=emulated-fails", "backbone.sharding=full", "emulated.ranks_per_process=1")
    config = override_config(config_of(data, "decoupled"), names)
    classes = replace(actor_classes(config), backbone=FailsAtWork)
    started = time.monotonic()
    with pytest.raises(WorkerLostError, match="failed: ValueError: the cause"):
        run_training(config, classes=classes)
    assert time.monotonic() - started < config.limits.stall_timeout_s, "nobody waited for the limit"
