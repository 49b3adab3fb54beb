"""Checkpoints of a pipeline with an encoder: other degrees, other places of the encoder, other modes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowtrain.errors import CheckpointError
from flowtrain.training.checkpoint import load_backbone_state, stored_frozen
from flowtrain.training.mesh import BackboneGroup, init_backbone_group
from flowtrain.training.trainer import Trainer
from flowtrain.types.plan import Degrees
from tests.training.ranks import Job, run_ranks
from tests.training.test_monolithic import FROZEN, TRAINED, config_of, oracle_of
from tests.training.test_parallel import CONFIG, INTERLEAVED, merged, shape, steps_for
from tests.training.test_trainer import assert_equal_training

pytestmark = pytest.mark.processes

FIRST, MIXED, OWN = ({"encoder_layers": place} for place in ("first", "mixed", "own"))


@pytest.fixture
def group() -> Iterator[BackboneGroup]:
    group = init_backbone_group(0, Degrees(), torch.device("cpu"))
    yield group
    group.close()


@pytest.mark.parametrize(
    ("saved", "before", "resumed", "after"),
    [
        (Degrees(dp=2), FIRST, Degrees(pp=2), OWN),
        (Degrees(pp=2), MIXED, Degrees(dp=2, tp=2), FIRST),
        (Degrees(pp=2, tp=2), OWN | INTERLEAVED, Degrees(dp=2, pp=2), MIXED),
    ],
    ids=shape,
)
def test_a_trained_encoder_resumes_under_other_degrees_and_in_another_place(
    tmp_path: Path, saved: Degrees, before: dict[str, Any], resumed: Degrees, after: dict[str, Any]
) -> None:
    directory = tmp_path / "checkpoint"
    run_ranks(saved, Job(config_of(TRAINED, **before), steps_for(saved.dp)[:2], TRAINED, save_to=directory))
    steps = steps_for(resumed.dp)[2:]
    found = merged(
        run_ranks(resumed, Job(config_of(TRAINED, **after), steps, TRAINED, first_step=3, load_from=directory))
    )
    whole = oracle_of(TRAINED)
    oracle = replace(whole, results=whole.results[2:], gradients=whole.gradients[2:])
    assert_equal_training(found, oracle, 1e-4)
    assert stored_frozen(directory) == {}
    assert load_backbone_state(directory).keys() >= whole.weights.keys()


@pytest.mark.parametrize("family", [FROZEN, TRAINED], ids=["frozen", "trained"])
def test_a_resume_at_the_same_degrees_is_exact_to_the_bit(tmp_path: Path, family: Any) -> None:
    degrees, config, steps = Degrees(dp=2, pp=2), config_of(family, **MIXED), steps_for(2)
    run_ranks(degrees, Job(config, steps[:2], family, save_to=tmp_path / "checkpoint"))
    job = Job(config, steps[2:], family, first_step=3, load_from=tmp_path / "checkpoint")
    resumed, undisturbed = merged(run_ranks(degrees, job)), merged(run_ranks(degrees, Job(config, steps, family)))
    assert resumed.results == undisturbed.results[2:]
    assert all(np.array_equal(resumed.weights[name], weight) for name, weight in undisturbed.weights.items())


def test_a_frozen_encoder_is_named_by_origin_and_digest_wherever_it_lies(tmp_path: Path) -> None:
    found = []
    cases = [(Degrees(), FIRST), (Degrees(dp=2), FIRST), (Degrees(pp=2), OWN), (Degrees(pp=2, tp=2), MIXED)]
    for number, (degrees, keys) in enumerate(cases):
        directory = tmp_path / str(number)
        run_ranks(degrees, Job(config_of(FROZEN, **keys), (), FROZEN, save_to=directory))
        found.append(stored_frozen(directory))
        assert not any(name.startswith("encoders.") for name in load_backbone_state(directory))
    assert found[0]["encoders"]["origin"] == "encoders.vision.path unused"
    assert found == [found[0]] * len(cases)


def test_an_encoder_moves_between_actors_and_ranks(tmp_path: Path, group: BackboneGroup) -> None:
    """The checkpoint of one mode has the backbone that the other goes on with."""
    monolithic = config_of(FROZEN)
    for name, before, after in (("out", CONFIG, monolithic), ("in", monolithic, CONFIG)):
        trainer = Trainer(before, FROZEN, group, num_steps=10)
        for _, parameter in trainer.model.named_parameters():
            parameter.data.mul_(1.5 if parameter.requires_grad else 1.0)
        trainer.save_checkpoint(tmp_path / name)
        loaded = Trainer(after, FROZEN, group, num_steps=10, resume_from=tmp_path / name)
        expected = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}
        found = {n: p for n, p in loaded.model.named_parameters() if p.requires_grad}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[n].full_tensor(), expected[n].full_tensor()) for n in found)


def test_trained_encoder_weights_are_not_lost(tmp_path: Path, group: BackboneGroup) -> None:
    Trainer(config_of(TRAINED), TRAINED, group, num_steps=10).save_checkpoint(tmp_path / "trained")
    for config in (config_of(FROZEN), CONFIG):
        with pytest.raises(CheckpointError, match=r"trained weights of an encoder, and encoders\.vision\.trainable"):
            Trainer(config, FROZEN, group, num_steps=10, resume_from=tmp_path / "trained")


def test_another_frozen_encoder_is_refused(tmp_path: Path, group: BackboneGroup) -> None:
    Trainer(config_of(FROZEN), FROZEN, group, num_steps=10).save_checkpoint(tmp_path / "frozen")
    other = replace(FROZEN, tower="vit")
    with pytest.raises(CheckpointError, match=r"frozen encoders of digest .* \(from encoders\.vision\.path unused\)"):
        Trainer(config_of(FROZEN), other, group, num_steps=10, resume_from=tmp_path / "frozen")
    with pytest.raises(CheckpointError, match=r"has no model\.encoders\.vision\.tower"):
        Trainer(config_of(TRAINED), TRAINED, group, num_steps=10, resume_from=tmp_path / "frozen")
