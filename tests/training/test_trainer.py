"""The training step over real process groups, against a plain loop over the same samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from flowtrain.pipeline.executor import execute
from flowtrain.training.chunks import ModelChunks
from flowtrain.training.mesh import init_backbone_group
from flowtrain.training.trainer import Trainer
from flowtrain.types.plan import Degrees
from tests.training.ranks import (
    CPU,
    Job,
    Outcome,
    TinyFamily,
    make_batch,
    make_config,
    make_plan,
    relative_difference,
    run_oracle,
    run_ranks,
)

pytestmark = pytest.mark.processes

# Unequal microbatches; step 2 has a weightless one, step 3 leaves rank 1 without images (positions 3 and 7 have none).
STEPS_DP2 = (
    (((0, 1), (2,)), ((3,), (4, 5, 6))),
    (((8, 9, 10), (11,)), ((12,), ())),
    (((13, 14), (3,)), ((16,), (7,))),
)
STEPS_DP1 = tuple(tuple((held,) for row in slots for held in row if held) for slots in STEPS_DP2)


def assert_equal_training(found: Outcome, oracle: Outcome, weight_tolerance: float) -> None:
    for result, expected in zip(found.results, oracle.results, strict=True):
        assert result.loss == pytest.approx(expected.loss, rel=1e-5)
        assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        assert (result.num_samples, result.num_tokens, result.num_target_tokens) == (
            *(expected.num_samples, expected.num_tokens, expected.num_target_tokens),
        )
    for gradients, expected_gradients in zip(found.gradients, oracle.gradients, strict=True):
        assert gradients.keys() == expected_gradients.keys()
        for name, gradient in gradients.items():
            assert relative_difference(gradient, expected_gradients[name]) < 1e-5, name
    assert found.weights.keys() == oracle.weights.keys()
    for name, weight in found.weights.items():
        assert relative_difference(weight, oracle.weights[name]) < weight_tolerance, name


@pytest.mark.parametrize("normalization", ["token", "sample"])
@pytest.mark.parametrize(("world_size", "steps"), [(1, STEPS_DP1), (2, STEPS_DP2)])
def test_training_equals_a_plain_loop(world_size, steps, normalization):
    config = make_config(training={"loss_normalization": normalization, "max_grad_norm": 0.5})
    job = Job(config, steps)
    outcomes, oracle = run_ranks(world_size, job), run_oracle(job)
    assert_equal_training(outcomes[0], oracle, 1e-4)
    for outcome in outcomes:
        assert outcome.results == outcomes[0].results
        assert outcome.spans.count("forward") == outcome.spans.count("backward") == sum(len(s) for s in steps)
        assert outcome.spans.count("optimizer") == len(steps)


@pytest.mark.parametrize("normalization", ["token", "sample"])
def test_losses_of_samples_make_up_that_of_the_step_and_change_no_bit(normalization):
    training = {"loss_normalization": normalization}
    sources = [{"path": "unused", "name": name} for name in ("cats", "dogs")]
    rejected = frozenset({2, 5})
    plain, kept = (
        run_ranks(2, Job(make_config(training=training, **data), STEPS_DP2, rejected=rejected))
        for data in ({}, {"data": {"sources": sources}})
    )
    assert not any(result.sample_losses for outcome in plain for result in outcome.results)
    for number, slots in enumerate(STEPS_DP2):
        results = [outcome.results[number] for outcome in kept]
        assert [replace(result, sample_losses=()) for result in results] == [plain[0].results[number]] * 2
        samples = [sample for result in results for sample in result.sample_losses]
        ran = {position for row in slots for held in row for position in held} - rejected
        assert sorted(sample.position for sample in samples) == sorted(ran)
        total = sum(sample.loss for sample in samples) / sum(sample.weight for sample in samples)
        assert total == pytest.approx(results[0].loss, rel=1e-5)
    for name, weight in kept[0].weights.items():
        assert np.array_equal(weight, plain[0].weights[name]), name


@pytest.mark.parametrize("degrees", [Degrees(pp=2), Degrees(tp=2)])
def test_ranks_of_one_replica_count_each_sample_once(degrees):
    sources = [{"path": "unused", "name": name} for name in ("cats", "dogs")]
    job = Job(make_config(data={"sources": sources}), STEPS_DP1, TinyFamily(num_kv_heads=2))
    outcomes = run_ranks(degrees, job)
    for number, slots in enumerate(STEPS_DP1):
        results = [outcome.results[number] for outcome in outcomes]
        samples = [sample for result in results for sample in result.sample_losses]
        assert sorted(sample.position for sample in samples) == sorted(p for row in slots for held in row for p in held)
        total = sum(sample.loss for sample in samples) / sum(sample.weight for sample in samples)
        assert total == pytest.approx(results[0].loss, rel=1e-5)


@pytest.mark.parametrize(
    "family",
    [TinyFamily(tied=False), TinyFamily(freeze=("connector",)), TinyFamily(freeze=("backbone",))],
)
def test_sgd_without_clipping_over_variants_of_the_model(family):
    job = Job(make_config(training={"optimizer": "sgd", "max_grad_norm": 0}), STEPS_DP2, family)
    assert_equal_training(run_ranks(2, job)[0], run_oracle(job), 1e-5)


@pytest.mark.parametrize("normalization", ["token", "sample"])
def test_samples_rejected_after_planning_leave_no_trace(normalization):
    config = make_config(training={"loss_normalization": normalization})
    # 2 empties a microbatch, 5 thins one out.
    job = Job(config, STEPS_DP2, rejected=frozenset({2, 5, 13}))
    assert_equal_training(run_ranks(2, job)[0], run_oracle(job), 1e-4)


def test_a_step_whose_every_sample_was_rejected_changes_nothing():
    job = Job(make_config(), STEPS_DP2[:1], rejected=frozenset(range(8)))
    outcome = run_ranks(2, job)[0]
    (result,) = outcome.results
    assert (result.loss, result.num_samples, result.num_target_tokens) == (0.0, 0, 0)
    initial = run_oracle(Job(make_config(), ())).weights
    assert all(np.array_equal(weight, initial[name]) for name, weight in outcome.weights.items())


def test_evaluation_gives_the_loss_and_leaves_training_as_it_was():
    config = make_config()
    slots = (((0, 1), (2,)), ((3,), ()))
    evaluated, plain = (
        run_ranks(2, Job(config, STEPS_DP2[:1], eval_slots=slots if e else None))[0] for e in (True, False)
    )
    # What the next step would see as its loss before any update.
    oracle = run_oracle(Job(config, (*STEPS_DP2[:1], slots)))
    assert evaluated.results[-1].loss == pytest.approx(oracle.results[-1].loss, rel=1e-5)
    assert (evaluated.results[-1].grad_norm, evaluated.results[-1].lr) == (None, None)
    assert all(np.array_equal(weight, plain.weights[name]) for name, weight in evaluated.weights.items())


def test_bfloat16_keeps_float32_masters_and_comes_close():
    job = Job(make_config(model={"dtype": "bfloat16"}), STEPS_DP2)
    outcome, oracle = run_ranks(2, job)[0], run_oracle(Job(make_config(), STEPS_DP2))
    assert {weight.dtype for weight in outcome.weights.values()} == {np.dtype(np.float32)}
    for result, expected in zip(outcome.results, oracle.results, strict=True):
        assert result.loss == pytest.approx(expected.loss, rel=0.05)


def test_a_gradient_that_is_not_finite_makes_no_update():
    group = init_backbone_group(0, Degrees(), CPU)

    def poison(model: ModelChunks) -> None:
        _, parameter = next(iter(model.named_parameters()))
        parameter.grad.to_local().view(-1)[0] = float("inf")

    trainer = Trainer(make_config(), TinyFamily(), group, num_steps=10, before_optimizer=poison)
    before = {name: parameter.full_tensor().clone() for name, parameter in trainer.model.named_parameters()}
    batches = [make_batch(held[0], make_config()) for held in STEPS_DP1[0]]
    execute(trainer.begin_unit(make_plan(STEPS_DP1[0], 1)), trainer.stages, lambda index: batches[index])
    result = trainer.finish_unit()
    after = {name: parameter.full_tensor() for name, parameter in trainer.model.named_parameters()}
    group.close()
    assert result.grad_norm == float("inf") and np.isfinite(result.loss)
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
