"""Parameters frozen by name patterns, and learning rates by name patterns: against a plain loop, in every shape.

A run's ranks train all its cases in turn, since starting them takes longer than a case.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowtrain.config.run import RunConfig
from flowtrain.errors import CheckpointError
from flowtrain.models.initial_weights import local_index
from flowtrain.training.checkpoint import stored_frozen, stored_state
from flowtrain.training.frozen import digests_of
from flowtrain.training.mesh import BackboneGroup, init_backbone_group
from flowtrain.training.trainer import Trainer
from flowtrain.types.plan import Degrees
from tests.training.ranks import Job, Outcome, TinyFamily, make_config, run_jobs_on_ranks, run_oracle, run_ranks
from tests.training.test_combinations import (
    BY_TWO,
    FULL,
    GRADIENTS,
    MICROBATCH,
    OFFLOADED,
    STEP,
    WHOLE,
    config_with,
    two_steps,
)
from tests.training.test_monolithic import config_of as monolithic_config
from tests.training.test_parallel import CONFIG, FAMILY, INTERLEAVED, but_at_night, merged, shape, steps_for
from tests.training.test_trainer import assert_equal_training

pytestmark = pytest.mark.processes

LAYERS = "language_model.model.layers"
LEADING = ("connector", "*embed_tokens*", f"{LAYERS}.[01].*")
"""All before layer 2: no gradient goes further back."""
MOST = ("connector", "*embed_tokens*", f"{LAYERS}.[0-2].*")
SCATTERED = ("*.mlp.*", "*q_norm*", "connector.linear_1.*", f"{LAYERS}.2.input_layernorm.weight")
BY_HEAD = ("*lm_head*",)
"""The embedding too, if it is tied."""
ALL_BUT_NORM = ("connector", "*embed_tokens*", "*lm_head*", f"{LAYERS}.*")
RECOMPUTED = {"activation_checkpointing": "full"}
SELECTIVE = {"activation_checkpointing": "selective"}


@dataclass(frozen=True)
class Case:
    """Patterns, keys of ``backbone`` and ``pipeline``, and the seed of random action lists."""

    freeze: tuple[str, ...]
    backbone: dict[str, Any]
    tied: bool = True
    seed: int | None = None

    @property
    def family(self) -> TinyFamily:
        return replace(FAMILY, freeze=self.freeze, tied=self.tied)


RUNS = {
    Degrees(): [Case(LEADING, {}), Case(SCATTERED, RECOMPUTED), Case(ALL_BUT_NORM, OFFLOADED)],
    Degrees(dp=2): [
        Case(LEADING, STEP | FULL),
        Case(LEADING, MICROBATCH | FULL),
        Case(LEADING, STEP | GRADIENTS | RECOMPUTED),
        Case(SCATTERED, MICROBATCH | GRADIENTS),
        Case(SCATTERED, STEP | FULL | SELECTIVE, tied=False),
        Case(BY_HEAD, STEP | FULL),
        Case(ALL_BUT_NORM, MICROBATCH | FULL | OFFLOADED),
    ],
    Degrees(dp=4): [Case(LEADING, STEP | BY_TWO), Case(SCATTERED, MICROBATCH | BY_TWO)],
    Degrees(tp=2): [
        Case(LEADING, {}),
        Case(LEADING, WHOLE | RECOMPUTED),
        Case(SCATTERED, SELECTIVE),
        Case(BY_HEAD, {}),
        Case(BY_HEAD, WHOLE, tied=False),
        Case(ALL_BUT_NORM, {}),
    ],
    Degrees(pp=2): [
        Case(LEADING, {}),
        Case(LEADING, RECOMPUTED, tied=False),
        Case(LEADING, OFFLOADED | INTERLEAVED),
        Case(SCATTERED, INTERLEAVED),
        Case(BY_HEAD, {}),
        Case(ALL_BUT_NORM, {}, tied=False),
        Case(LEADING, {}, seed=1),
    ],
    Degrees(dp=2, pp=2): [
        Case(LEADING, MICROBATCH | FULL),
        Case(LEADING, STEP | GRADIENTS | INTERLEAVED),
        Case(SCATTERED, STEP | FULL, seed=2),
    ],
    Degrees(pp=2, tp=2): [Case(LEADING, {}), Case(SCATTERED, WHOLE, tied=False)],
    Degrees(pp=4): [Case(MOST, {}), Case(MOST, {}, tied=False, seed=3)],
}


@cache
def oracle_of(family: TinyFamily) -> Outcome:
    return run_oracle(Job(CONFIG, two_steps(1), family))


def trained_names(family: TinyFamily) -> set[str]:
    """First names of what no pattern names; a module is what its parameters' names begin with."""
    every = list(family.load_backbone().named_parameters(remove_duplicate=False))
    names: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in every:
        names.setdefault(parameter, []).append(name)
    patterns = ["connector.*" if key == "connector" else key for key in family.freeze]
    return {
        aliases[0]
        for aliases in names.values()
        if not any(fnmatchcase(name, pattern) for name in aliases for pattern in patterns)
    }


@pytest.mark.parametrize(
    "degrees", but_at_night(RUNS, (Degrees(tp=2), Degrees(dp=4), Degrees(pp=2), Degrees(dp=2, pp=2))), ids=shape
)
def test_what_is_not_frozen_is_trained_as_in_a_plain_loop(degrees: Degrees) -> None:
    cases, steps = RUNS[degrees], two_steps(degrees.dp)
    jobs = [Job(config_with(case.backbone), steps, case.family, schedule_seed=case.seed) for case in cases]
    for case, outcomes in zip(cases, run_jobs_on_ranks(degrees, jobs), strict=True):
        try:
            found = merged(outcomes)
            assert found.gradients[0].keys() == trained_names(case.family)
            assert_equal_training(found, oracle_of(case.family), 1e-4)
        except AssertionError as error:
            raise AssertionError(f"under {case}") from error


def test_an_encoder_in_the_pipeline_before_frozen_stages() -> None:
    """A frozen one has no backward at all; a trained one needs the gradients that frozen layers pass on."""
    cases = [
        (replace(FAMILY, freeze=LEADING, trains_tower=is_trained), {"encoder_layers": place} | chunks)
        for is_trained in (False, True)
        for place, chunks in (("first", {}), ("mixed", INTERLEAVED), ("own", {}))
    ]
    jobs = [Job(monolithic_config(family, None, **keys), two_steps(1), family) for family, keys in cases]
    for (family, keys), outcomes in zip(cases, run_jobs_on_ranks(Degrees(pp=2), jobs), strict=True):
        try:
            oracle = run_oracle(Job(monolithic_config(family), two_steps(1), family))
            assert_equal_training(merged(outcomes), oracle, 1e-4)
        except AssertionError as error:
            raise AssertionError(f"under {keys}, trained: {family.trains_tower}") from error


RATES = {"*lm_head*": 5e-3, f"{LAYERS}.1.*": 0.0, "*.mlp.up_proj.*": 0.0, "connector": 2e-3}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("degrees", [Degrees(dp=2), Degrees(pp=2), Degrees(tp=2)], ids=shape)
def test_learning_rates_by_pattern_equal_a_plain_loop(degrees: Degrees, tied: bool) -> None:
    """The tied weight is named by its last name, and each stage's copy of it has the rate."""
    family = replace(FAMILY, tied=tied)
    config = make_config(training={"learning_rate": 1e-3, "learning_rates": RATES})
    found = merged(run_ranks(degrees, Job(config, two_steps(degrees.dp), family)))
    assert_equal_training(found, run_oracle(Job(config, two_steps(1), family)), 1e-4)
    first = run_oracle(Job(config, (), family)).weights
    stays = {name for name, weight in found.weights.items() if np.array_equal(weight, first[name])}
    assert stays == {name for name in first if f"{LAYERS}.1." in name or ".up_proj." in name}


# --- checkpoints -----------------------------------------------------------------------------------------------------


def frozen_config(*freeze: str) -> RunConfig:
    return CONFIG.model_copy(update={"model": CONFIG.model.model_copy(update={"freeze": freeze})})


@pytest.mark.parametrize(
    ("saved", "resumed"), [(Degrees(dp=2), Degrees(pp=2)), (Degrees(pp=2, tp=2), Degrees(dp=2))], ids=shape
)
@pytest.mark.parametrize("freeze", [LEADING, SCATTERED], ids=["leading", "scattered"])
def test_a_checkpoint_holds_what_is_trained_and_resumes(
    tmp_path: Path, saved: Degrees, resumed: Degrees, freeze: tuple[str, ...]
) -> None:
    family, config, directory = replace(FAMILY, freeze=freeze), frozen_config(*freeze), tmp_path / "checkpoint"
    run_ranks(saved, Job(config, steps_for(saved.dp)[:2], family, save_to=directory))
    backbone = family.load_backbone()
    frozen = [
        (name, each.detach(), local_index(each)) for name, each in backbone.named_parameters() if not each.requires_grad
    ]
    digests = {module: entry["digest"] for module, entry in stored_frozen(directory).items()}
    assert digests == {module: f"{digest:016x}" for module, digest in digests_of(frozen).items()}
    stored, tied = set(stored_state(directory)), "language_model.lm_head.weight"
    assert stored - {tied} == trained_names(family)
    assert (tied in stored) == ("language_model.model.embed_tokens.weight" in trained_names(family))
    job = Job(config, steps_for(resumed.dp)[2:], family, first_step=3, load_from=directory)
    oracle = run_oracle(Job(CONFIG, steps_for(1), family))
    oracle.results, oracle.gradients = oracle.results[2:], oracle.gradients[2:]
    assert_equal_training(merged(run_ranks(resumed, job)), oracle, 1e-4)


@pytest.fixture
def group() -> Iterator[BackboneGroup]:
    own = init_backbone_group(0, Degrees(), torch.device("cpu"))
    yield own
    own.close()


def trainer_of(group: BackboneGroup, *freeze: str) -> Trainer:
    return Trainer(frozen_config(*freeze), replace(FAMILY, freeze=freeze), group, num_steps=10)


def test_the_optimizer_has_what_is_trained(group: BackboneGroup) -> None:
    trainer = trainer_of(group, *SCATTERED)
    held = [each for groups in trainer.optimizer.param_groups for each in groups["params"]]
    named = {parameter: name for name, parameter in trainer.model.named_parameters()}
    assert {named[each] for each in held} == trained_names(replace(FAMILY, freeze=SCATTERED))
    pages = sum(-(-each.to_local().nbytes // mmap.PAGESIZE) for each in held)
    assert trainer.copy_nbytes() == 3 * mmap.PAGESIZE * pages, "a weight and two moments"


def test_a_checkpoint_of_another_choice_is_refused(tmp_path: Path, group: BackboneGroup) -> None:
    trainer_of(group, f"{LAYERS}.0.*").save_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=rf"has no model\.{LAYERS}\.0\.\S+: it belongs to another model"):
        trainer_of(group, f"{LAYERS}.0.mlp.*").load_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="was trained with a frozen backbone of digest"):
        trainer_of(group, f"{LAYERS}.[01].*").load_checkpoint(tmp_path)
