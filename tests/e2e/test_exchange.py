"""Without the pool, features cross sockets: the run is the same to the bit, also when an encoder dies."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from flowtrain.actors.encoder import Encoder, Work
from flowtrain.actors.pooling import PoolMember
from flowtrain.config.run import RunConfig
from flowtrain.controller.run import run_training
from flowtrain.controller.worker_group import ActorClasses
from flowtrain.observability.run_dir import run_dir
from tests.e2e.disturbed import exact_metrics, json_lines
from tests.e2e.worlds import World, tiny_config

pytestmark = pytest.mark.e2e

BATCH, NUM_STEPS, CORRUPT_ROW = 6, 3, 4


def config_of(directory: Path, exchange: str) -> RunConfig:
    return tiny_config(
        directory,
        directory / "data.parquet",
        exchange,
        data={"shuffle": False},
        training={"global_batch_size": BATCH, "max_steps": NUM_STEPS},
        backbone={"data_parallel_size": 2},
        pool={"exchange": exchange},
    )


class DyingEncoder(Encoder):
    """An encoder dies once, with a batch that it has encoded and not reported."""

    def _finish(self, member: PoolMember, work: Work) -> None:
        if work.lease.batch.unit == 1:
            with suppress(FileExistsError):
                with (Path(self._config.runs_dir) / "died").open("x") as mark:
                    mark.write(self._name)
                os.kill(os.getpid(), signal.SIGKILL)
        super()._finish(member, work)


def test_features_over_sockets_train_the_same_to_the_bit(
    tmp_path: Path, ray_cluster: None, capfd: pytest.CaptureFixture[str]
) -> None:
    world = World(seed=5)
    world.add_mixed(BATCH * NUM_STEPS)
    world.rows[CORRUPT_ROW]["images"] = [{"bytes": world.truncated_image(), "path": None}]
    world.write(tmp_path / "data.parquet")
    pooled, sent = config_of(tmp_path, "pool"), config_of(tmp_path, "point_to_point")
    run_training(pooled)
    run_training(sent, classes=ActorClasses(encoder=DyingEncoder))
    name = (Path(sent.runs_dir) / "died").read_text()
    assert f"{name} died (its process was killed, or crashed); it is started again" in capfd.readouterr().err
    assert exact_metrics(run_dir(sent)) == exact_metrics(run_dir(pooled))
    ours, theirs = ([line["read_nbytes"] for line in json_lines(run_dir(each).metrics)] for each in (sent, pooled))
    assert ours == theirs and min(ours) > 0
