"""The memory of a run with its own degrees, by mode."""

from __future__ import annotations

from typing import Any

import pytest

from flowtrain.allocator.memory import backbone_memory
from flowtrain.allocator.run_memory import RunMemory, memory_of_run
from flowtrain.config.run import RunConfig
from flowtrain.costs.memory import encoder_peak_nbytes
from flowtrain.costs.training_setup import TrainingSetup
from flowtrain.types.plan import Degrees
from tests.allocator.worlds import BACKBONE, MODEL, VISION, workload


def memory(mode: str, pp: int = 2, encoder: dict[str, Any] | None = None, **pipeline: Any) -> RunMemory:
    config = RunConfig.model_validate(
        {
            "name": "memory",
            "mode": mode,
            "model": {"dtype": "bfloat16"},
            "encoders": {"vision": {"path": "unused", **(encoder or {})}},
            "backbone": {"path": "unused", "pipeline_parallel_size": pp, "activation_checkpointing": "full"},
            "pipeline": pipeline,
            "data": {"sources": [{"path": "unused"}]},
            "training": {"max_steps": 1, "global_batch_size": 256},
            "scheduler": {"microbatch_tokens": 8192},
        }
    )
    return memory_of_run(config, MODEL, workload())


@pytest.mark.parametrize("mode", ["decoupled", "colocated", "disaggregated"])
def test_ranks_are_the_planners_and_actors_have_the_encoder(mode: str) -> None:
    found = memory(mode)
    setup = TrainingSetup(activation_checkpointing="full")
    assert found.fullest == backbone_memory(MODEL, workload(), setup, Degrees(pp=2))
    peak = encoder_peak_nbytes(VISION, 1, max_batch_patches=4096, dtype_nbytes=2)
    assert found.encoders == {"vision": peak} and found.device_nbytes == found.fullest.peak + peak


def test_without_vision_there_are_no_features() -> None:
    found, with_vision = memory("llm_only"), memory("decoupled")
    assert not found.encoders and found.ranks[0].activations < with_vision.ranks[0].activations
    assert found.ranks[1] == with_vision.ranks[1]


@pytest.mark.parametrize("place", ["first", "mixed", "own"])
@pytest.mark.parametrize("is_trained", [False, True])
def test_ranks_share_a_monolithic_encoder(place: str, is_trained: bool) -> None:
    found = memory("monolithic", 2, {"trainable": is_trained}, encoder_layers=place)
    plain = memory("decoupled")
    assert not found.encoders
    per_layer, num_layers = VISION.layer_parameters, VISION.num_layers
    weights = VISION.outside_parameters + num_layers * per_layer
    whole = BACKBONE.num_parameters + MODEL.connector.num_parameters
    if not is_trained:
        assert sum(rank.frozen for rank in found.ranks) == 2 * weights
        assert sum(rank.parameters for rank in found.ranks) == 4 * whole
        if place == "own":
            assert all(rank.frozen >= 2 * num_layers // 2 * per_layer for rank in found.ranks)
        assert "encoding" in found.ranks[0].moments and "encoding" not in plain.ranks[0].moments
    else:
        assert not any(rank.frozen or rank.encoding for rank in found.ranks)
        assert sum(rank.parameters for rank in found.ranks) == 4 * (whole + weights)
        assert sum(rank.optimizer_state for rank in found.ranks) == 8 * (whole + weights)
        frozen = memory("monolithic", 2, encoder_layers=place)
        assert found.ranks[0].activations > frozen.ranks[0].activations
