"""Settings that change where tensors lie and when they are summed, not what is computed: against a plain loop.

A run's ranks train all its cases in turn, since starting them takes longer than a case.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowtrain.config.pipeline import PipelineConfig
from flowtrain.config.run import RunConfig
from flowtrain.training.checkpoint import load_backbone_state
from flowtrain.types.plan import Degrees
from tests.training.ranks import Job, Outcome, TinyFamily, run_jobs_on_ranks, run_oracle, run_ranks
from tests.training.test_parallel import CONFIG, FAMILY, INTERLEAVED, but_at_night, merged, oracle_of, shape, steps_for
from tests.training.test_trainer import assert_equal_training

pytestmark = pytest.mark.processes

STEP, MICROBATCH = {"gradient_reduction": "step"}, {"gradient_reduction": "microbatch"}
FULL, GRADIENTS = {"sharding": "full"}, {"sharding": "gradients"}
BY_TWO, BY_FOUR = ({"sharding": "hybrid", "hybrid_shard_size": size} for size in (2, 4))
KEPT, OFFLOADED = {"activation_checkpointing": "none"}, {"activation_checkpointing": "offload"}
SPLIT, WHOLE = {"sequence_parallel": True}, {"sequence_parallel": False}


@dataclass(frozen=True)
class Case:
    """Keys of ``backbone``, the model, and the seed of random action lists, with a memory strategy for each action."""

    backbone: dict[str, Any]
    family: TinyFamily = FAMILY
    seed: int | None = None
    num_steps: int = 2


SHALLOW = replace(FAMILY, num_layers=2)
UNTIED, FROZEN = replace(FAMILY, tied=False), replace(FAMILY, freeze=("connector",))


def every(*settings: list[dict[str, Any]]) -> list[Case]:
    """A short case for each combination."""
    combinations = [dict(chain.from_iterable(map(dict.items, chosen))) for chosen in product(*settings)]
    return [Case(each, SHALLOW, num_steps=1) for each in combinations]


REDUCTIONS, SHARDINGS, KEPT_OR_NOT = [STEP, MICROBATCH], [FULL, BY_TWO], [KEPT, OFFLOADED]
RUNS = {
    Degrees(dp=4, tp=2): [
        *every(REDUCTIONS, SHARDINGS, KEPT_OR_NOT, [SPLIT, WHOLE]),
        Case(STEP | BY_TWO, UNTIED, seed=1),
    ],
    Degrees(dp=4, pp=2): [
        *every(REDUCTIONS, SHARDINGS, KEPT_OR_NOT),
        Case(STEP | BY_TWO | INTERLEAVED, seed=2),
        Case(MICROBATCH | BY_TWO | INTERLEAVED, UNTIED, seed=3),
    ],
    Degrees(dp=2, pp=2, tp=2): [
        Case(MICROBATCH | FULL, seed=4),
        Case(MICROBATCH | GRADIENTS | WHOLE | INTERLEAVED, UNTIED, seed=5),
        Case(STEP | GRADIENTS | OFFLOADED),
        Case(STEP | FULL | OFFLOADED | INTERLEAVED, FROZEN),
    ],
    Degrees(dp=8): [Case(MICROBATCH | BY_FOUR), Case(STEP | BY_TWO, seed=6)],
    Degrees(dp=3): [Case(MICROBATCH | FULL, FROZEN, seed=7)],
    Degrees(pp=2, tp=2): [Case(MICROBATCH | WHOLE, seed=8), Case(STEP | OFFLOADED | INTERLEAVED, UNTIED)],
    Degrees(tp=4): [Case(MICROBATCH | OFFLOADED)],
    Degrees(pp=2): [Case(MICROBATCH | OFFLOADED | INTERLEAVED)],
    Degrees(): [Case(MICROBATCH, seed=9)],
}


def config_with(settings: dict[str, Any], config: RunConfig = CONFIG) -> RunConfig:
    """The configuration with these keys of ``backbone``, and those of ``pipeline`` that are among them."""
    pipeline = {key: value for key, value in settings.items() if key in PipelineConfig.model_fields}
    backbone = {key: value for key, value in settings.items() if key not in pipeline}
    return config.model_copy(
        update={
            "backbone": config.backbone.model_copy(update=backbone),
            "pipeline": config.pipeline.model_copy(update=pipeline),
        }
    )


def two_steps(dp_size: int) -> tuple[Any, ...]:
    """One of several microbatches on each rank, weightless ones among them, and one of fewer."""
    steps = steps_for(dp_size)
    return steps[2], steps[0]


@cache
def oracle_after(num_steps: int, family: TinyFamily) -> Outcome:
    return run_oracle(Job(CONFIG, two_steps(1)[:num_steps], family))


@pytest.mark.parametrize("degrees", but_at_night(RUNS, (Degrees(dp=4, tp=2), Degrees(dp=8))), ids=shape)
def test_settings_equal_a_plain_loop(degrees: Degrees) -> None:
    cases, steps = RUNS[degrees], two_steps(degrees.dp)
    jobs = [
        Job(config_with(case.backbone), steps[: case.num_steps], case.family, schedule_seed=case.seed) for case in cases
    ]
    for case, outcomes in zip(cases, run_jobs_on_ranks(degrees, jobs), strict=True):
        try:
            assert_equal_training(merged(outcomes), oracle_after(case.num_steps, case.family), 1e-4)
        except AssertionError as error:
            raise AssertionError(f"under {case}") from error


def test_rejected_samples_and_an_evaluation_change_nothing() -> None:
    """The correction for rejected samples comes after the sums; an evaluation does not touch what was summed."""
    steps, rejected = two_steps(4), frozenset({0, 2, 10, 13})
    settings = (MICROBATCH | FULL, MICROBATCH | BY_TWO, STEP | BY_TWO)
    jobs = [Job(config_with(each), steps, FAMILY, rejected=rejected, eval_slots=steps[0]) for each in settings]
    longer = run_oracle(Job(CONFIG, (*two_steps(1), two_steps(1)[0]), FAMILY, rejected=rejected))
    oracle = run_oracle(Job(CONFIG, two_steps(1), FAMILY, rejected=rejected))
    for outcomes in run_jobs_on_ranks(4, jobs):
        whole = merged(outcomes)
        assert whole.results.pop().loss == pytest.approx(longer.results[-1].loss, rel=1e-5)
        assert_equal_training(whole, oracle, 1e-4)


def test_sums_over_ranks_are_as_many_as_the_settings_say() -> None:
    """Gradients stay sharded between microbatches only if each of them is reduced."""
    steps, num_groups = two_steps(4), FAMILY.num_layers + 1  # FSDP's: the layers and the root
    num_steps, num_microbatches = len(steps), sum(map(len, steps))
    assert num_microbatches > num_steps
    expected = [
        (STEP | FULL, num_steps, 0),
        (MICROBATCH | FULL, num_microbatches, 0),
        (STEP | BY_TWO, num_steps, num_steps),
        (MICROBATCH | BY_TWO, num_microbatches, num_steps),
    ]
    jobs = [Job(config_with(backbone), steps, FAMILY, counts_operators=True) for backbone, _, _ in expected]
    for (_, scattered, summed), outcomes in zip(expected, run_jobs_on_ranks(4, jobs), strict=True):
        for outcome in outcomes:
            assert outcome.operators["c10d::_reduce_scatter_base_"] == num_groups * scattered
            # Each step also sums its totals and the gradients' norm.
            assert outcome.operators["c10d::allreduce_"] == num_groups * summed + 2 * num_steps


@pytest.mark.parametrize(
    ("saved", "before", "resumed", "after"),
    [
        (Degrees(dp=4), BY_TWO, Degrees(dp=2, tp=2), FULL),
        (Degrees(dp=2, pp=2), GRADIENTS, Degrees(dp=4), BY_TWO),
        pytest.param(Degrees(dp=4, tp=2), BY_TWO, Degrees(dp=4, pp=2), BY_TWO | MICROBATCH, marks=pytest.mark.nightly),
    ],
    ids=lambda value: shape(value) if isinstance(value, Degrees) else "-".join(map(str, value.values())),
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
    settings, steps = {"full": FULL, "hybrid": BY_TWO}, two_steps(4)
    jobs = [Job(config_with(each), steps, FAMILY, save_to=tmp_path / name) for name, each in settings.items()]
    run_jobs_on_ranks(4, jobs)
    full, hybrid = (sum(file.stat().st_size for file in (tmp_path / name).glob("*.distcp")) for name in settings)
    weights, oracle = load_backbone_state(tmp_path / "hybrid"), oracle_after(2, FAMILY).weights
    assert all(np.allclose(weights[name].numpy(), oracle[name], rtol=1e-4, atol=1e-6) for name in oracle)
    state_nbytes = 3 * sum(value.nbytes for value in oracle.values())  # a weight has two moments
    assert state_nbytes < hybrid < full, "hybrid shards are fewer; each has some bytes of its own"
