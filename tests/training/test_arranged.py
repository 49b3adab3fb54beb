"""Steps as PipeTune arranges them, against the same steps as packed: losses, every gradient, weights."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from flowtrain.types.plan import Degrees
from tests.training.ranks import Job, make_config, run_jobs_on_ranks
from tests.training.test_monolithic import FROZEN, FURTHER
from tests.training.test_parallel import merged
from tests.training.test_trainer import assert_equal_training

pytestmark = pytest.mark.processes

Step = tuple[tuple[tuple[int, ...], ...], ...]


def reordered(step: Step) -> Step:
    return step[::-1]


def repacked(step: Step) -> Step:
    """More microbatches, in another order."""
    return tuple(((position,),) for row in step for held in row for position in held)[::-1]


def test_arranged_steps_have_the_gradients_of_the_packed_ones() -> None:
    """With SGD, as the tests of random lists: AdamW's first updates enlarge rounding."""
    ways: list[tuple[Callable[[Step], Step], bool]] = list(product((reordered, repacked), (False, True)))
    cases: list[tuple[Any, ...]] = list(product(("token", "sample"), ways))
    jobs = []
    for normalization in ("token", "sample"):
        config = make_config(
            mode="monolithic",
            training={"learning_rate": 1e-3, "optimizer": "sgd", "loss_normalization": normalization},
        )
        jobs.append(Job(config, FURTHER, FROZEN))
        jobs += [Job(config, tuple(map(way, FURTHER)), FROZEN, encodes_ahead=ahead) for way, ahead in ways]
    found = [merged(outcomes) for outcomes in run_jobs_on_ranks(Degrees(pp=2), jobs)]
    size = len(ways) + 1
    packed = {"token": found[0], "sample": found[size]}
    arranged = [*found[1:size], *found[size + 1 :]]
    assert packed["token"].results[0].loss != pytest.approx(packed["sample"].results[0].loss, rel=1e-4)
    for (normalization, way), outcome in zip(cases, arranged, strict=True):
        try:
            assert_equal_training(outcome, packed[normalization], 1e-5)
        except AssertionError as error:
            raise AssertionError(f"under {normalization}, {way}") from error
