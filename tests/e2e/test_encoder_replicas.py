"""Encoders of several processes: a run with them trains as without, also when one of their processes dies."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from flowtrain.actors.encoder_rank import EncoderRank
from flowtrain.allocator.plan import fixed_plan
from flowtrain.config.load import override_config
from flowtrain.config.run import RunConfig
from flowtrain.controller.run import run_training
from flowtrain.controller.worker_group import ActorClasses
from flowtrain.models.encoder import VisionEncoder
from flowtrain.observability.ledger import read_ledger
from flowtrain.observability.run_dir import run_dir
from tests.e2e.worlds import World, tiny_config

pytestmark = pytest.mark.e2e

BATCH, NUM_STEPS = 6, 3


def config_of(directory: Path, name: str, tensor_parallel: int) -> RunConfig:
    return tiny_config(
        directory,
        directory / "data.parquet",
        name,
        "encoders.vision.data_parallel_size=1",
        f"encoders.vision.tensor_parallel_size={tensor_parallel}",
        "limits.max_encoder_restarts=1",
        "data.num_feeders=1",
        training={"global_batch_size": BATCH, "max_steps": NUM_STEPS, "optimizer": "sgd"},
    )


def losses_of(config: RunConfig) -> list[float]:
    return [json.loads(line)["loss"] for line in run_dir(config).metrics.read_text().splitlines()]


class MortalEncoderRank(EncoderRank):
    """Dies in its second forward, once."""

    _num_forwards = 0

    def forward(self, module: VisionEncoder, *images: Any) -> None:
        self._num_forwards += 1
        grave = Path(self._config.runs_dir) / f"{self._config.name}.died"
        if self._num_forwards == 2 and not grave.exists():
            grave.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        super().forward(module, *images)


def test_split_encoders_train_as_whole_ones_and_outlive_an_encoder_rank(tmp_path: Path, ray_cluster: None) -> None:
    world = World(seed=7)
    world.add_mixed(BATCH * NUM_STEPS)
    world.write(tmp_path / "data.parquet")
    whole = config_of(tmp_path, "whole", 1)
    run_training(whole)
    split = config_of(tmp_path, "split", 2)
    # As ``flowtrain train --plan`` does.
    planned = override_config(whole, ["name=split"]).with_plan(fixed_plan(split))
    assert planned == split
    run_training(planned, classes=ActorClasses(encoder_rank=MortalEncoderRank))
    assert (tmp_path / "runs" / "split.died").exists()
    assert losses_of(split) == pytest.approx(losses_of(whole), rel=1e-5)
    ledger = read_ledger(run_dir(split).ledger).to_pylist()
    assert [row["position"] for row in ledger] == list(range(BATCH * NUM_STEPS))
