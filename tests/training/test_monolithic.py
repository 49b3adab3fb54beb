"""The encoder inside the backbone's ranks, against a plain loop of the HF modules: losses, every gradient, weights."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from flowtrain.config.run import RunConfig
from flowtrain.types.plan import Degrees
from tests.training.ranks import Job, Outcome, TinyFamily, make_config, run_jobs_on_ranks, run_oracle
from tests.training.test_parallel import FAMILY, INTERLEAVED, merged, shape, steps_for
from tests.training.test_trainer import assert_equal_training

pytestmark = pytest.mark.processes

FROZEN, TRAINED = FAMILY, replace(FAMILY, trains_tower=True)
PLACES = ("first", "mixed", "own")


def config_of(family: TinyFamily, backbone: dict[str, Any] | None = None, **pipeline: Any) -> RunConfig:
    encoder = {"path": "unused", "trainable": family.trains_tower}
    return make_config(
        mode="monolithic",
        encoders={"vision": encoder},
        pipeline=pipeline,
        backbone={"path": "unused", **(backbone or {})},
        training={"learning_rate": 1e-3},
    )


@cache
def oracle_of(family: TinyFamily) -> Outcome:
    return run_oracle(Job(config_of(family), steps_for(1), family))


@pytest.mark.parametrize("degrees", [Degrees(), Degrees(dp=2), Degrees(pp=2), Degrees(dp=2, pp=2)], ids=shape)
def test_the_encoder_in_each_place_equals_a_plain_loop(degrees: Degrees) -> None:
    cases = [(family, {"encoder_layers": place}) for place in PLACES for family in (FROZEN, TRAINED)]
    if degrees.pp > 1:
        cases += [(TRAINED, INTERLEAVED | {"encoder_layers": place}) for place in PLACES]
    steps = steps_for(degrees.dp)
    jobs = [Job(config_of(family, None, **pipeline), steps, family) for family, pipeline in cases]
    for (family, pipeline), outcomes in zip(cases, run_jobs_on_ranks(degrees, jobs), strict=True):
        try:
            assert_equal_training(merged(outcomes), oracle_of(family), 1e-4)
        except AssertionError as error:
            raise AssertionError(f"under {pipeline}, trained: {family.trains_tower}") from error
