"""Settings that change where tensors lie, not what is computed: combinations of them against a plain loop.

Every row of `CASES` is a run of up to eight ranks. A row with a seed runs random legal action lists, with random memory
strategies, so one row covers all strategies.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowtrain.config.run import RunConfig
from flowtrain.training.checkpoint import load_backbone_state
from flowtrain.types.plan import Degrees
from tests.training.ranks import Job, TinyFamily, run_oracle, run_ranks
from tests.training.test_parallel import CONFIG, FAMILY, INTERLEAVED, merged, oracle_of, shape, steps_for
from tests.training.test_trainer import assert_equal_training

pytestmark = pytest.mark.processes

STEP, MICROBATCH = {"gradient_reduction": "step"}, {"gradient_reduction": "microbatch"}
FULL, GRADIENTS = {"sharding": "full"}, {"sharding": "gradients"}
BY_TWO, BY_FOUR = ({"sharding": "hybrid", "hybrid_shard_size": size} for size in (2, 4))
OFFLOAD, WHOLE = {"activation_checkpointing": "offload"}, {"sequence_parallel": False}


@dataclass(frozen=True)
class Case:
    """Degrees, keys of ``backbone``, the model, and the seed of random action lists."""

    degrees: Degrees
    backbone: dict[str, Any]
    family: TinyFamily = FAMILY
    seed: int | None = None

    def __str__(self) -> str:
        values = [shape(self.degrees), *map(str, self.backbone.values())]
        return "-".join(values if self.seed is None else [*values, f"seed{self.seed}"])


UNTIED, FROZEN = replace(FAMILY, tied=False), replace(FAMILY, freeze=("connector",))
CASES = [
    Case(Degrees(), MICROBATCH | FULL),
    Case(Degrees(dp=2), MICROBATCH | FULL, seed=1),
    Case(Degrees(dp=3), MICROBATCH | GRADIENTS),
    Case(Degrees(pp=2), MICROBATCH | FULL | INTERLEAVED | OFFLOAD),
    Case(Degrees(dp=2, pp=2), MICROBATCH | FULL, seed=2),
    Case(Degrees(dp=2, pp=2), MICROBATCH | GRADIENTS | INTERLEAVED, seed=3),
    Case(Degrees(dp=2, tp=2), MICROBATCH | FULL | OFFLOAD, UNTIED),
    Case(Degrees(dp=2, tp=2), STEP | GRADIENTS | WHOLE | OFFLOAD),
    Case(Degrees(pp=2, tp=2), MICROBATCH | FULL | WHOLE, seed=9),
    Case(Degrees(pp=2, tp=2), STEP | FULL | OFFLOAD | INTERLEAVED, UNTIED),
    Case(Degrees(tp=4), MICROBATCH | FULL | OFFLOAD),
    Case(Degrees(dp=4), STEP | BY_TWO, seed=4),
    Case(Degrees(dp=4), MICROBATCH | BY_TWO, FROZEN, seed=5),
    Case(Degrees(dp=4, pp=2), MICROBATCH | BY_TWO | OFFLOAD),
    Case(Degrees(dp=4, pp=2), STEP | BY_TWO | INTERLEAVED, seed=6),
    Case(Degrees(dp=4, tp=2), MICROBATCH | BY_TWO),
    Case(Degrees(dp=4, tp=2), STEP | BY_TWO | WHOLE, UNTIED, seed=7),
    Case(Degrees(dp=2, pp=2, tp=2), MICROBATCH | FULL, seed=8),
    Case(Degrees(dp=8), MICROBATCH | BY_FOUR),
]


def config_with(backbone: dict[str, Any], config: RunConfig = CONFIG) -> RunConfig:
    return config.model_copy(update={"backbone": config.backbone.model_copy(update=backbone)})


@pytest.mark.parametrize("case", CASES, ids=str)
def test_settings_equal_a_plain_loop(case: Case) -> None:
    job = Job(config_with(case.backbone), steps_for(case.degrees.dp), case.family, schedule_seed=case.seed)
    assert_equal_training(merged(run_ranks(case.degrees, job)), oracle_of(case.family), 1e-4)


@pytest.mark.parametrize("backbone", [MICROBATCH | FULL, MICROBATCH | BY_TWO, STEP | BY_TWO], ids=shape)
def test_rejected_samples_and_an_evaluation_change_nothing(backbone: dict[str, Any]) -> None:
    """The correction for rejected samples comes after the sums; an evaluation does not touch what was summed."""
    steps, rejected = steps_for(4), frozenset({0, 2, 9, 13})
    job = Job(config_with(backbone), steps, FAMILY, rejected=rejected, eval_slots=steps[0])
    whole = merged(run_ranks(4, job))
    oracle = run_oracle(Job(CONFIG, (*steps_for(1), steps_for(1)[0]), FAMILY, rejected=rejected))
    assert whole.results.pop().loss == pytest.approx(oracle.results.pop().loss, rel=1e-5)
    oracle.gradients.pop()
    oracle.weights = run_oracle(Job(CONFIG, steps_for(1), FAMILY, rejected=rejected)).weights
    assert_equal_training(whole, oracle, 1e-4)


@pytest.mark.parametrize(
    ("backbone", "reduces_each", "all_reduces"),
    [
        (STEP | FULL, False, False),
        (MICROBATCH | FULL, True, False),
        (STEP | BY_TWO, False, True),
        (MICROBATCH | BY_TWO, True, True),
    ],
    ids=str,
)
def test_sums_over_ranks_are_as_many_as_the_settings_say(
    backbone: dict[str, Any], reduces_each: bool, all_reduces: bool
) -> None:
    steps, num_groups = steps_for(4), FAMILY.num_layers + 1  # FSDP's: the layers and the root
    num_microbatches = sum(map(len, steps))
    assert num_microbatches > len(steps)
    expected = Counter({"_reduce_scatter_base_": num_groups * (num_microbatches if reduces_each else len(steps))})
    if all_reduces:
        expected["allreduce_"] = num_groups * len(steps)
    for outcome in run_ranks(4, Job(config_with(backbone), steps, FAMILY, counts_collectives=True)):
        del outcome.collectives["_allgather_base_"]
        assert outcome.collectives == expected


@pytest.mark.parametrize(
    ("saved", "before", "resumed", "after"),
    [
        (Degrees(dp=4), BY_TWO, Degrees(dp=2, tp=2), FULL),
        (Degrees(dp=2, pp=2), GRADIENTS, Degrees(dp=4), BY_TWO),
        (Degrees(dp=4, tp=2), BY_TWO, Degrees(dp=4, pp=2), BY_TWO | MICROBATCH),
    ],
    ids=shape,
)
def test_a_checkpoint_resumes_under_other_sharding(
    tmp_path: Path, saved: Degrees, before: dict[str, Any], resumed: Degrees, after: dict[str, Any]
) -> None:
    directory = tmp_path / "checkpoint"
    run_ranks(saved, Job(config_with(before), steps_for(saved.dp)[:2], FAMILY, save_to=directory))
    job = Job(config_with(after), steps_for(resumed.dp)[2:], FAMILY, first_step=3, load_from=directory)
    expected = oracle_of(FAMILY)
    oracle = replace(expected, results=expected.results[2:], gradients=expected.gradients[2:])
    assert_equal_training(merged(run_ranks(resumed, job)), oracle, 1e-4)


def test_replicas_of_a_shard_are_saved_once(tmp_path: Path) -> None:
    nbytes = {}
    for name, backbone in (("full", FULL), ("hybrid", BY_TWO)):
        run_ranks(4, Job(config_with(backbone), steps_for(4)[:1], FAMILY, save_to=tmp_path / name))
        nbytes[name] = sum(file.stat().st_size for file in (tmp_path / name).glob("*.distcp"))
    # A shard's file entry has about a kilobyte of its own, and hybrid shards are half as many.
    weights = load_backbone_state(tmp_path / "hybrid")
    state_nbytes = 3 * sum(weight.nbytes for weight in {id(w): w for w in weights.values()}.values())
    assert state_nbytes < nbytes["hybrid"] < nbytes["full"] < 2 * state_nbytes + 10**6
    oracle = run_oracle(Job(CONFIG, steps_for(1)[:1], FAMILY)).weights
    assert all(np.allclose(weights[name].numpy(), oracle[name], rtol=1e-4, atol=1e-6) for name in oracle)
