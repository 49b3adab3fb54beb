"""The encoder inside the backbone's ranks, against a plain loop of the HF modules: losses, every gradient, weights."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest

from flowtrain.config.run import RunConfig
from flowtrain.pipeline.actions import ActionKind
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
    run_jobs_on_ranks,
    run_oracle,
)
from tests.training.test_parallel import FAMILY, INTERLEAVED, at_night, merged, shape, steps_for
from tests.training.test_trainer import assert_equal_training

pytestmark = pytest.mark.processes

FROZEN, TRAINED = FAMILY, replace(FAMILY, trains_tower=True)
PLACES = ("first", "mixed", "own")


def config_of(
    family: TinyFamily, backbone: dict[str, Any] | None = None, optimizer: str = "adamw", **pipeline: Any
) -> RunConfig:
    encoder = {"path": "unused", "trainable": family.trains_tower}
    return make_config(
        mode="monolithic",
        encoders={"vision": encoder},
        pipeline=pipeline,
        backbone={"path": "unused", **(backbone or {})},
        training={"learning_rate": 1e-3, "optimizer": optimizer},
    )


@cache
def oracle_of(family: TinyFamily, num_steps: int = 4) -> Outcome:
    return run_oracle(Job(config_of(family), steps_for(1)[:num_steps], family))


@pytest.mark.parametrize("degrees", [Degrees(), at_night(dp=2), at_night(pp=2), Degrees(dp=2, pp=2)], ids=shape)
def test_the_encoder_in_each_place_equals_a_plain_loop(degrees: Degrees) -> None:
    cases = [(family, {"encoder_layers": place}) for place in PLACES for family in (FROZEN, TRAINED)]
    cases += [(TRAINED, INTERLEAVED | {"encoder_layers": place}) for place in PLACES]
    steps = steps_for(degrees.dp)
    jobs = [Job(config_of(family, None, **pipeline), steps, family) for family, pipeline in cases]
    for (family, pipeline), outcomes in zip(cases, run_jobs_on_ranks(degrees, jobs), strict=True):
        try:
            assert_equal_training(merged(outcomes), oracle_of(family), 1e-4)
        except AssertionError as error:
            raise AssertionError(f"under {pipeline}, trained: {family.trains_tower}") from error


FURTHER = tuple(
    tuple(tuple(tuple(position + 80 for position in held) for held in row) for row in step) for step in steps_for(1)
)
"""In the third of the usual steps, the tower's gradients cancel to a fourteenth, and rounding is up to 1e-5."""


def test_any_legal_order_and_any_parts_give_the_same_gradients() -> None:
    """Plans carry random lists whose microbatches come in parts that join, with every memory strategy.

    With SGD: parts round differently, which AdamW's first updates enlarge to 1e-5 in a few of the gradients after. The
    loop computes in float64, because one in float32 rounds as much as the runs that it checks.
    """
    oracles = {
        family: run_oracle(Job(config_of(family, optimizer="sgd"), FURTHER, family), exactly=True)
        for family in (FROZEN, TRAINED)
    }
    cases = [
        (family, {"encoder_layers": place} | chunks, seed)
        for seed, (place, family, chunks) in enumerate(product(PLACES, (FROZEN, TRAINED), ({}, INTERLEAVED)))
    ]
    jobs = [
        Job(config_of(family, optimizer="sgd", **keys), FURTHER, family, schedule_seed=seed)
        for family, keys, seed in cases
    ]
    for case, outcomes in zip(cases, run_jobs_on_ranks(Degrees(pp=2), jobs), strict=True):
        try:
            assert_equal_training(merged(outcomes), oracles[case[0]], 1e-5)
        except AssertionError as error:
            raise AssertionError(f"under {case}") from error


# Every fourth sample has no image (3, 7, 11, ...): a step, a rank, a microbatch without any.
IMAGELESS = (
    (((3,), (7,)), ((11,), (15, 19))),
    (((0, 1), (3,)), ((2,), (7,))),
    (((3,), (0,)), ((4,), (7, 11)), ((5,), ())),
)


@pytest.mark.parametrize("kind", ["vit", "dinov2"])
@pytest.mark.parametrize("degrees", [at_night(dp=2), Degrees(dp=2, pp=2)], ids=shape)
def test_without_images_in_a_step_a_rank_or_a_microbatch(degrees: Degrees, kind: str) -> None:
    flat = tuple(tuple((held,) for row in slots for held in row if held) for slots in IMAGELESS)
    families = [replace(family, tower=kind) for family in (FROZEN, TRAINED)]
    cases = [(family, place) for family in families for place in (PLACES if degrees.pp > 1 else PLACES[:1])]
    jobs = [Job(config_of(family, None, encoder_layers=place), IMAGELESS, family) for family, place in cases]
    for (family, _), outcomes in zip(cases, run_jobs_on_ranks(degrees, jobs), strict=True):
        found = merged(outcomes)
        of_tower = [gradient for name, gradient in found.gradients[0].items() if name.startswith("encoders.")]
        assert bool(of_tower) == family.trains_tower and not any(gradient.any() for gradient in of_tower)
        assert_equal_training(found, run_oracle(Job(config_of(family), flat, family)), 1e-4)


@pytest.mark.parametrize("degrees", [Degrees(tp=2), Degrees(pp=2, tp=2), at_night(dp=2, tp=2)], ids=shape)
def test_a_tower_split_over_tensors_equals_a_plain_loop(degrees: Degrees) -> None:
    """Two steps: AdamW makes rounding of the first gradients grow from step to step."""
    kinds = ("dinov2", "vit") if degrees == Degrees(tp=2) else ("dinov2",)
    places = PLACES if degrees.pp > 1 else PLACES[:1]
    cases = [
        (replace(family, tower=kind), place, sequence_parallel)
        for kind, family, place, sequence_parallel in product(kinds, (FROZEN, TRAINED), places, (True, False))
    ]
    jobs = [
        Job(config_of(family, {"sequence_parallel": split}, encoder_layers=place), steps_for(degrees.dp)[:2], family)
        for family, place, split in cases
    ]
    for case, outcomes in zip(cases, run_jobs_on_ranks(degrees, jobs), strict=True):
        try:
            assert_equal_training(merged(outcomes), oracle_of(case[0], 2), 1e-4)
        except AssertionError as error:
            raise AssertionError(f"under {case}") from error


HYBRID = {"sharding": "hybrid", "hybrid_shard_size": 2}
SETTINGS: list[dict[str, Any]] = [
    {"gradient_reduction": "microbatch"},
    {"gradient_reduction": "microbatch", **HYBRID},
    {"gradient_reduction": "step", **HYBRID, "activation_checkpointing": "full"},
    {"sharding": "gradients", "activation_checkpointing": "offload"},
]


def test_a_trained_tower_under_every_sharding_equals_a_plain_loop() -> None:
    places = [PLACES[number % len(PLACES)] for number in range(len(SETTINGS))]
    cases = list(zip(SETTINGS, places, strict=True))
    steps = steps_for(4)
    jobs = [Job(config_of(TRAINED, keys, encoder_layers=place), steps, TRAINED) for keys, place in cases]
    for case, outcomes in zip(cases, run_jobs_on_ranks(Degrees(dp=4), jobs), strict=True):
        try:
            assert_equal_training(merged(outcomes), oracle_of(TRAINED), 1e-4)
        except AssertionError as error:
            raise AssertionError(f"under {case}") from error


@pytest.mark.parametrize("freeze", [("backbone",), ("connector",), ("connector", "backbone")], ids="-".join)
def test_gradients_reach_the_tower_through_frozen_modules(freeze: tuple[str, ...]) -> None:
    """With SGD and float64, as above."""
    family = replace(TRAINED, freeze=freeze)
    jobs = [Job(config_of(family, optimizer="sgd", encoder_layers=place), FURTHER, family) for place in PLACES]
    oracle = run_oracle(Job(config_of(family, optimizer="sgd"), FURTHER, family), exactly=True)
    for outcomes in run_jobs_on_ranks(Degrees(pp=2), jobs):
        assert_equal_training(merged(outcomes), oracle, 1e-5)


@pytest.mark.parametrize("family", [FROZEN, TRAINED], ids=["frozen", "trained"])
def test_bfloat16_comes_close(family: TinyFamily) -> None:
    config = config_of(family, encoder_layers="mixed")
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
    (outcomes,) = run_jobs_on_ranks(Degrees(pp=2), [Job(config, steps_for(1), family, eval_slots=steps_for(1)[0])])
    whole = merged(outcomes)
    assert {weight.dtype.name for weight in whole.weights.values()} == {"float32"}
    whole.results.pop()
    for result, expected in zip(whole.results, oracle_of(family).results, strict=True):
        assert result.loss == pytest.approx(expected.loss, rel=0.02)


@pytest.mark.parametrize("family", [FROZEN, TRAINED], ids=["frozen", "trained"])
def test_an_evaluation_and_rejected_samples_change_nothing(family: TinyFamily) -> None:
    rejected, steps, degrees = frozenset({0, 2, 9}), steps_for(2), Degrees(dp=2, pp=2)
    jobs = [
        Job(config_of(family, encoder_layers=place), steps[:2], family, rejected=rejected, eval_slots=steps[2])
        for place in PLACES
    ]
    oracle = run_oracle(Job(config_of(family), steps_for(1)[:3], family, rejected=rejected))
    held_out = oracle.results.pop().loss  # what the third step sees before its update
    oracle = replace(
        run_oracle(Job(config_of(family), steps_for(1)[:2], family, rejected=rejected)), results=oracle.results
    )
    for outcomes in run_jobs_on_ranks(degrees, jobs):
        found = merged(outcomes)
        assert found.results.pop().loss == pytest.approx(held_out, rel=1e-5)
        assert_equal_training(found, oracle, 1e-4)


@pytest.mark.parametrize("family", [FROZEN, TRAINED], ids=["frozen", "trained"])
def test_an_input_is_kept_for_the_backward_only_if_its_gradient_goes_back(family: TinyFamily) -> None:
    group, config = init_backbone_group(0, Degrees(), CPU), config_of(family)
    trainer, batch = Trainer(config, family, group, num_steps=10), make_batch([0, 1], config)
    for action in trainer.begin_unit(make_plan((((0, 1),),), 1)):
        if action.kind is ActionKind.FORWARD_STAGE:
            trainer.stages.forward_stage(action, batch)
    kept = [given is not None for given, _ in trainer.stages._graphs.values()]
    assert kept == ([False, True] if family.trains_tower else [False])
    group.close()
