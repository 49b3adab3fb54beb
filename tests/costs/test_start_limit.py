"""The limit of a start follows the model's size, unless it is set."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowtrain.allocator.model_file import read_model_file
from flowtrain.config.flow import START_BASE_S, LimitsConfig
from flowtrain.costs.start_limit import start_limit

MODEL = read_model_file(Path(__file__).parents[2] / "configs" / "models" / "vlm_72b.yaml").model


def test_a_larger_model_may_take_longer() -> None:
    first, resumed = start_limit(None, MODEL, resumes=False), start_limit(None, MODEL, resumes=True)
    assert first.nbytes == 4 * MODEL.num_parameters
    assert first.seconds == pytest.approx(START_BASE_S + 4 * MODEL.num_parameters / 200e6)
    backbone = MODEL.backbone.num_parameters + MODEL.connector.num_parameters
    assert resumed.nbytes == first.nbytes + 8 * backbone
    assert "limits.start_timeout_s is not set: 300 s" in first.text and "GB of state at 200 MB/s" in first.text


def test_the_key_wins() -> None:
    limit = start_limit(40.0, MODEL, resumes=True)
    assert (limit.seconds, limit.text) == (40.0, "40 s, as limits.start_timeout_s says")
    assert LimitsConfig(start_timeout_s=40.0).start_limit_s == 40.0
    assert LimitsConfig().start_limit_s == START_BASE_S
