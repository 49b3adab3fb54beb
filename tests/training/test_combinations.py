"""Settings that change where tensors lie, not what is computed: each combination against a plain loop.

Every row of `CASES` is a run of up to eight ranks. Together the rows hold every pair of two settings' values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from flowtrain.types.plan import Degrees
from tests.training.ranks import Job, TinyFamily, run_ranks
from tests.training.test_parallel import CONFIG, FAMILY, INTERLEAVED, merged, oracle_of, steps_for
from tests.training.test_trainer import assert_equal_training

pytestmark = pytest.mark.processes


@dataclass(frozen=True)
class Case:
    """Degrees, keys of ``backbone``, and the model."""

    degrees: Degrees
    backbone: dict[str, Any] = field(default_factory=dict)
    family: TinyFamily = FAMILY


def hybrid(shard_size: int) -> dict[str, Any]:
    return {"sharding": "hybrid", "hybrid_shard_size": shard_size}


STEP, MICROBATCH = {"gradient_reduction": "step"}, {"gradient_reduction": "microbatch"}
FULL, GRADIENTS = {"sharding": "full"}, {"sharding": "gradients"}

CASES = [
    Case(Degrees(), MICROBATCH | FULL),
    Case(Degrees(dp=2), MICROBATCH | FULL),
    Case(Degrees(dp=2, tp=2), MICROBATCH | GRADIENTS),
    Case(Degrees(dp=2, pp=2), MICROBATCH | FULL | INTERLEAVED),
    Case(Degrees(dp=4), STEP | hybrid(2)),
    Case(Degrees(dp=4), MICROBATCH | hybrid(2)),
    Case(Degrees(dp=4, tp=2), MICROBATCH | hybrid(2)),
    Case(Degrees(dp=4, pp=2), MICROBATCH | hybrid(2)),
    Case(Degrees(dp=4, pp=2), STEP | hybrid(2) | INTERLEAVED),
    Case(Degrees(dp=8), MICROBATCH | hybrid(4)),
]


def name_of(case: Case) -> str:
    values = "-".join(str(value) for value in case.backbone.values())
    return f"dp{case.degrees.dp}pp{case.degrees.pp}tp{case.degrees.tp}-{values}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_settings_equal_a_plain_loop(case: Case) -> None:
    config = CONFIG.model_copy(update={"backbone": CONFIG.backbone.model_copy(update=case.backbone)})
    outcomes = run_ranks(case.degrees, Job(config, steps_for(case.degrees.dp), case.family))
    assert_equal_training(merged(outcomes), oracle_of(case.family), 1e-4)
