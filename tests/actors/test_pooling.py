"""An actor's part of the pool: whether it gives HBM, and the log line with the reason if not."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowtrain.actors.encoder import Encoder
from flowtrain.actors.pooling import hbm_offer, join_pool
from flowtrain.config.flow import PoolConfig
from flowtrain.config.run import RunConfig
from flowtrain.mempool.tiers.hbm import NO_ACCELERATOR
from flowtrain.types.memory import Extent
from tests.actors.scripted import ScriptedLink, new_run_id

SKIPPED = "memory pool: the hbm tier is skipped "


@pytest.mark.parametrize(
    ("settings", "reason", "nbytes", "line"),
    [
        ({}, NO_ACCELERATOR, 0, SKIPPED + "(no accelerator); features stay in dram"),
        ({}, None, 0, SKIPPED + "(pool.hbm_segment_nbytes is 0); features stay in dram"),
        (
            {"hbm_segment_nbytes": 4096},
            NO_ACCELERATOR,
            0,
            SKIPPED + "(no accelerator), so pool.hbm_segment_nbytes (4096) has no effect; features stay in dram",
        ),
        (
            {"hbm_segment_nbytes": 4096, "network": "nixl"},
            None,
            0,
            SKIPPED + "(pool.network is nixl, and it is read on its own node alone), so pool.hbm_segment_nbytes (4096) "
            "has no effect; features stay in dram",
        ),
        (
            {"hbm_segment_nbytes": 4096, "hbm_high_watermark": 0.8},
            None,
            4096,
            "memory pool: each encoder gives 4096 bytes of hbm; above 80% features go to dram",
        ),
    ],
)
def test_the_hbm_that_an_encoder_gives_is_logged(
    settings: dict[str, Any], reason: str | None, nbytes: int, line: str
) -> None:
    assert hbm_offer(PoolConfig(**settings), reason) == (nbytes, line)


@pytest.mark.parametrize(("asked_nbytes", "level"), [(0, logging.INFO), (4096, logging.WARNING)])
def test_an_encoder_without_an_accelerator_joins_with_dram_alone(
    caplog: pytest.LogCaptureFixture, asked_nbytes: int, level: int
) -> None:
    caplog.set_level(logging.INFO, "flowtrain")
    link = ScriptedLink()
    config = PoolConfig(hbm_segment_nbytes=asked_nbytes)
    member = join_pool(link, config, new_run_id(), "encoder-0", 1 << 16, "knob", torch.device("cpu"), gives_hbm=True)
    try:
        assert [args[0].tier for args in link.said["publish"]] == ["dram"]
        (record,) = [record for record in caplog.records if "hbm" in record.message]
        assert record.levelno == level and record.message.startswith(SKIPPED + "(no accelerator)")
    finally:
        member.pool.close()


def test_a_part_that_goes_to_hbm_is_written_there_in_the_runs_type(config: RunConfig) -> None:
    memory = torch.zeros(2 * 3 * 4, dtype=torch.uint8)
    extents = (Extent(1 << 56, len(memory)),)

    def write(nbytes: int, fill: Any) -> Sequence[Extent]:
        assert nbytes == len(memory)
        fill(memory)
        return extents

    pool: Any = SimpleNamespace(write_on_device=write)
    images = [torch.full((1, 3), 1.5, dtype=torch.bfloat16), torch.full((1, 3), -2.0, dtype=torch.float64)]
    encoder = Encoder(config, "vision", "encoder-0", new_run_id())
    hold: Any = 7
    assert encoder._write(pool, images, hold) == extents
    assert memory.view(torch.float32).view(2, 3).tolist() == [[1.5] * 3, [-2.0] * 3]
