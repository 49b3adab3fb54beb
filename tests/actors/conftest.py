"""A small data set with a torn image and an oversized sample, and the configuration of a run on it."""

from __future__ import annotations

import pytest
import torch

from flowtrain.config.run import RunConfig
from tests.e2e.worlds import World, tiny_config

TORN_ROW, OVERSIZED_ROW = 3, 6
BATCH, NUM_STEPS = 4, 4


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Four steps of four samples, in the order of their rows."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("actors")
    world = World()
    world.add_mixed(BATCH * NUM_STEPS)
    world.rows[TORN_ROW]["images"] = [{"bytes": world.truncated_image(), "path": None}]
    world.rows[OVERSIZED_ROW]["texts"] = [{"user": "why", "assistant": world.words(200, 200)}]
    return tiny_config(
        directory,
        world.write(directory / "data.parquet"),
        data={"shuffle": False},
        training={"global_batch_size": BATCH, "max_steps": NUM_STEPS},
        limits={"stop_timeout_s": 10.0},
    )
