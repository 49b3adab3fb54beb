"""Every (data, pipeline, tensor) shape of up to four ranks against a plain loop: losses, every gradient, weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowtrain.training.checkpoint import load_backbone_state
from flowtrain.types.plan import Degrees
from tests.training.ranks import Job, Outcome, TinyFamily, make_config, run_oracle, run_ranks
from tests.training.test_trainer import assert_equal_training

pytestmark = pytest.mark.processes

FAMILY = TinyFamily(num_layers=4, num_heads=4, num_kv_heads=4)
THREE_HEADS = replace(FAMILY, num_heads=3, num_kv_heads=3)


def family_for(degrees: Degrees) -> TinyFamily:
    return THREE_HEADS if degrees.tp == 3 else FAMILY


def shape(value: object) -> str:
    """Name of a test's parameter, which ``-k`` can select."""
    return f"dp{value.dp}pp{value.pp}tp{value.tp}" if isinstance(value, Degrees) else "-".join(map(str, value))


def at_night(**degrees: int) -> Any:
    """A parameter that only `make test-full` tries, since others try each of its degrees."""
    return pytest.param(Degrees(**degrees), marks=pytest.mark.nightly)


def but_at_night(every: Iterable[Degrees], nightly: Collection[Degrees]) -> list[Any]:
    """All of them as parameters, some only at night."""
    return [pytest.param(each, marks=pytest.mark.nightly) if each in nightly else each for each in every]


SIZES = (1, 2, 3, 4)
SHAPES = [
    Degrees(dp, pp, tp) for dp in SIZES for pp in SIZES for tp in SIZES if 1 < Degrees(dp, pp, tp).world_size <= 4
]


def steps_for(dp_size: int) -> tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]:
    """The same samples a step for any number of replicas, dealt to them in turn; ends with a weightless one."""
    held = (
        ((0,), (1, 2), (3,), (4, 5)),
        ((6, 7, 8), (9,)),
        ((10,), (11,), (12, 13), (3,), (15, 16), (7,)),
        ((17, 18),),
    )
    steps = []
    for microbatches in held:
        padded = [*microbatches, *[()] * (-len(microbatches) % dp_size)]
        steps.append(tuple(tuple(padded[k : k + dp_size]) for k in range(0, len(padded), dp_size)))
    return tuple(steps)


def merged(outcomes: list[Outcome]) -> Outcome:
    """One outcome of all ranks' parameters; what several hold must be the same everywhere."""
    whole = replace(outcomes[0], gradients=[dict() for _ in outcomes[0].gradients], weights={})
    for outcome in outcomes:
        assert outcome.results == whole.results
        for mine, all_of_them in (
            (outcome.weights, whole.weights),
            *zip(outcome.gradients, whole.gradients, strict=True),
        ):
            for name, value in mine.items():
                assert np.array_equal(all_of_them.setdefault(name, value), value), name
    return whole


# Below 2 / curvature: above it fp32 noise grows from step to step, for whichever way the sums are ordered.
CONFIG = make_config(training={"learning_rate": 1e-3})


@cache
def oracle_of(family: TinyFamily) -> Outcome:
    return run_oracle(Job(CONFIG, steps_for(1), family))


@cache
def held_out_loss_of(family: TinyFamily) -> float:
    """The loss after all steps: what another step would see before any update."""
    return run_oracle(Job(CONFIG, (*steps_for(1), steps_for(1)[2]), family)).results[-1].loss


@pytest.mark.parametrize("degrees", SHAPES, ids=shape)
def test_shapes_equal_a_plain_loop(degrees: Degrees) -> None:
    family, steps = family_for(degrees), steps_for(degrees.dp)
    whole = merged(run_ranks(degrees, Job(CONFIG, steps, family, eval_slots=steps[2])))
    assert whole.results.pop().loss == pytest.approx(held_out_loss_of(family), rel=1e-5)
    assert_equal_training(whole, oracle_of(family), 1e-4)


@pytest.mark.nightly
def test_compiled_layers_split_over_tensors_equal_a_plain_loop() -> None:
    family, steps = TinyFamily(num_kv_heads=2), steps_for(1)[:2]  # to compile is what takes long
    outcomes = run_ranks(Degrees(tp=2), Job(CONFIG, steps, replace(family, compile_with="aot_eager")))
    assert_equal_training(merged(outcomes), run_oracle(Job(CONFIG, steps, family)), 1e-4)


# --- what a shape meets besides plain steps ---------------------------------------------------------------------------

INTERLEAVED = {"schedule": "interleaved_1f1b", "chunks": 2}


@pytest.mark.parametrize("degrees", [each for each in SHAPES if each.pp > 1], ids=shape)
def test_interleaved_stages_equal_a_plain_loop(degrees: Degrees) -> None:
    family = replace(FAMILY, num_layers=max(4, 2 * degrees.pp))
    config = CONFIG.model_copy(update={"pipeline": CONFIG.pipeline.model_copy(update=INTERLEAVED)})
    outcomes = run_ranks(degrees, Job(config, steps_for(degrees.dp), family))
    assert_equal_training(merged(outcomes), oracle_of(family), 1e-4)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))])
@pytest.mark.parametrize(
    ("degrees", "pipeline"),
    [(Degrees(pp=2), {}), (Degrees(pp=3), {}), (Degrees(pp=2), INTERLEAVED), (Degrees(dp=2, pp=2), INTERLEAVED)],
    ids=shape,
)
def test_any_legal_order_gives_the_same_gradients(degrees: Degrees, pipeline: dict[str, Any], seed: int) -> None:
    """Random schedules and exchanged neighbours, every memory strategy among them, run over real transfers."""
    config = CONFIG.model_copy(update={"pipeline": CONFIG.pipeline.model_copy(update=pipeline)})
    outcomes = run_ranks(degrees, Job(config, steps_for(degrees.dp), FAMILY, schedule_seed=seed))
    assert_equal_training(merged(outcomes), oracle_of(FAMILY), 1e-4)


@pytest.mark.parametrize(
    ("degrees", "variant", "sections"),
    [
        (Degrees(pp=2, tp=2), {"tied": False}, {}),
        (Degrees(dp=2, pp=2), {"freeze": ("connector",)}, {}),
        (Degrees(pp=2, tp=2), {"freeze": ("backbone",)}, {}),
        (Degrees(dp=2, tp=2), {"freeze": ("backbone",)}, {}),
        (Degrees(dp=2, pp=2), {}, {"backbone": {"path": "unused", "sharding": "gradients"}}),
        (Degrees(dp=2, pp=2), {}, {"training": {"loss_normalization": "sample", "max_grad_norm": 0.1}}),
        (Degrees(dp=2, tp=2), {}, {"training": {"optimizer": "sgd", "max_grad_norm": 0}}),
        (Degrees(pp=2), {}, {"backbone": {"path": "unused", "activation_checkpointing": "full"}}),
        (Degrees(dp=2, tp=2), {}, {"backbone": {"path": "unused", "activation_checkpointing": "selective"}}),
        (Degrees(pp=2, tp=2), {}, {"backbone": {"path": "unused", "activation_checkpointing": "every_n"}}),
    ],
    ids=shape,
)
def test_variants_equal_a_plain_loop(degrees: Degrees, variant: dict[str, Any], sections: dict[str, Any]) -> None:
    training = {"learning_rate": 1e-3} | sections.get("training", {})
    config = make_config(**(sections | {"training": training}))
    family = replace(FAMILY, **variant)
    outcomes = run_ranks(degrees, Job(config, steps_for(degrees.dp), family))
    assert_equal_training(merged(outcomes), run_oracle(Job(config, steps_for(1), family)), 1e-4)


@pytest.mark.parametrize(
    "degrees",
    but_at_night(SHAPES, [each for each in SHAPES if each.world_size < 4 or each.pp == 4]),
    ids=shape,
)
def test_samples_rejected_after_planning_leave_no_trace(degrees: Degrees) -> None:
    rejected = frozenset({0, 2, 9, 13})  # 0 and 9 empty a microbatch
    family = family_for(degrees)
    outcomes = run_ranks(degrees, Job(CONFIG, steps_for(degrees.dp), family, rejected=rejected))
    assert_equal_training(merged(outcomes), run_oracle(Job(CONFIG, steps_for(1), family, rejected=rejected)), 1e-4)


@pytest.mark.parametrize("degrees", [Degrees(dp=2, pp=2), Degrees(pp=2, tp=2), Degrees(pp=4)], ids=shape)
def test_evaluation_gives_the_loss_and_leaves_training_as_it_was(degrees: Degrees) -> None:
    steps = steps_for(degrees.dp)
    evaluated = run_ranks(degrees, Job(CONFIG, steps[:1], FAMILY, eval_slots=steps[2]))
    # What the next step would see as its loss before any update.
    oracle = run_oracle(Job(CONFIG, (steps_for(1)[0], steps_for(1)[2]), FAMILY))
    for outcome in evaluated:
        assert outcome.results[-1].loss == pytest.approx(oracle.results[-1].loss, rel=1e-5)
        assert (outcome.results[-1].grad_norm, outcome.results[-1].lr) == (None, None)
    plain = merged(run_ranks(degrees, Job(CONFIG, steps[:1], FAMILY)))
    assert all(np.array_equal(weight, plain.weights[name]) for name, weight in merged(evaluated).weights.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("degrees", [Degrees(), Degrees(dp=2, tp=2)], ids=shape)
def test_a_checkpoint_behind_an_evaluation_holds_the_weights(tmp_path: Path, degrees: Degrees, dtype: str) -> None:
    config = CONFIG.model_copy(
        update={
            "model": CONFIG.model.model_copy(update={"dtype": dtype}),
            "backbone": CONFIG.backbone.model_copy(update={"sharding": "gradients"}),
        }
    )
    steps, directory = steps_for(degrees.dp), tmp_path / "checkpoint"
    saved = merged(run_ranks(degrees, Job(config, steps[:1], FAMILY, eval_slots=steps[2], save_to=directory)))
    loaded = merged(run_ranks(degrees, Job(config, (), FAMILY, load_from=directory)))
    assert all(np.array_equal(loaded.weights[name], weight) for name, weight in saved.weights.items())


def test_bfloat16_comes_close() -> None:
    config = CONFIG.model_copy(update={"model": CONFIG.model.model_copy(update={"dtype": "bfloat16"})})
    degrees = Degrees(pp=2, tp=2)
    outcome = merged(run_ranks(degrees, Job(config, steps_for(1), FAMILY)))
    assert {weight.dtype for weight in outcome.weights.values()} == {np.dtype(np.float32)}
    oracle = run_oracle(Job(CONFIG, steps_for(1), FAMILY))
    for result, expected in zip(outcome.results, oracle.results, strict=True):
        assert result.loss == pytest.approx(expected.loss, rel=0.02)


@pytest.mark.parametrize(
    ("saved", "resumed", "pipeline"),
    [
        (Degrees(dp=2), Degrees(pp=2, tp=2), {}),
        (Degrees(pp=2, tp=2), Degrees(dp=2, pp=2), {}),
        (Degrees(pp=4), Degrees(tp=4), {}),
        (Degrees(tp=2), Degrees(pp=2), INTERLEAVED),
        (Degrees(pp=3), Degrees(), {}),
    ],
    ids=shape,
)
@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_resumes_under_other_degrees(
    tmp_path: Path, saved: Degrees, resumed: Degrees, pipeline: dict[str, Any], tied: bool
) -> None:
    family = replace(FAMILY, tied=tied)
    run_ranks(saved, Job(CONFIG, steps_for(saved.dp)[:2], family, save_to=tmp_path / "checkpoint"))
    config = CONFIG.model_copy(update={"pipeline": CONFIG.pipeline.model_copy(update=pipeline)})
    job = Job(config, steps_for(resumed.dp)[2:], family, first_step=3, load_from=tmp_path / "checkpoint")
    oracle = run_oracle(Job(CONFIG, steps_for(1), family))
    oracle.results, oracle.gradients = oracle.results[2:], oracle.gradients[2:]
    assert_equal_training(merged(run_ranks(resumed, job)), oracle, 1e-4)
    exported = load_backbone_state(tmp_path / "checkpoint")
    assert exported.keys() == family.load_backbone().state_dict().keys()


def test_resume_at_the_same_degrees_is_exact_to_the_bit(tmp_path: Path) -> None:
    degrees = Degrees(pp=2, tp=2)
    run_ranks(degrees, Job(CONFIG, steps_for(1)[:2], FAMILY, save_to=tmp_path / "checkpoint"))
    job = Job(CONFIG, steps_for(1)[2:], FAMILY, first_step=3, load_from=tmp_path / "checkpoint")
    resumed, undisturbed = (
        merged(run_ranks(degrees, job)),
        merged(run_ranks(degrees, Job(CONFIG, steps_for(1), FAMILY))),
    )
    assert resumed.results == undisturbed.results[2:]
    assert all(np.array_equal(resumed.weights[name], weight) for name, weight in undisturbed.weights.items())


GOLDEN_LOSSES = (
    *(3.910074, 3.81663, 3.373744, 3.30094, 3.137683, 3.004956, 2.975766, 2.758972, 2.831034, 2.51583, 2.6877, 2.27801),
)
"""Of `run_oracle` over these steps (torch 2.13, CPU, fp32): a change here is a change of what training computes."""


def test_the_loss_curve_is_the_golden_one() -> None:
    config = make_config(training={"learning_rate": 3e-3})
    steps = steps_for(2)[:2] * 6
    outcome = run_ranks(Degrees(dp=2, pp=2), Job(config, steps, FAMILY))[0]
    assert [result.loss for result in outcome.results] == pytest.approx(GOLDEN_LOSSES, rel=1e-4)
