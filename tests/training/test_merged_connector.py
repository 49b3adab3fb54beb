"""Qwen3-VL's frozen connector, which runs with the encoder or in the backbone: one digest, and a resume in any mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from flowtrain.controller.export import CheckpointedWeights
from flowtrain.errors import CheckpointError
from flowtrain.models.families.registry import family_from_config
from flowtrain.training.checkpoint import load_backbone_state, stored_frozen
from flowtrain.training.mesh import BackboneGroup, init_backbone_group
from flowtrain.training.trainer import Trainer
from flowtrain.types.plan import Degrees
from tests.training.ranks import CPU, run_ranks
from tests.training.test_qwen3_vl import CONNECTOR, Case

pytestmark = pytest.mark.processes

BESIDE, INSIDE = Case(freeze=CONNECTOR), Case("monolithic", freeze=CONNECTOR)
"""The connector runs with the encoder, and in the backbone."""


@pytest.fixture
def group() -> Iterator[BackboneGroup]:
    group = init_backbone_group(0, Degrees(), CPU)
    yield group
    group.close()


def trainer_of(group: BackboneGroup, case: Case, seed: int = 5, resume_from: Path | None = None) -> Trainer:
    config = case.config.model_copy(update={"seed": seed})
    return Trainer(config, family_from_config(config), group, num_steps=10, resume_from=resume_from)


def save(
    rank: int, degrees: Degrees, host: str, port: int, listener: Any, jobs: Sequence[tuple[Case, Path]]
) -> list[dict[str, Any]]:
    """Body of one rank's process: a checkpoint of each case; returns what it says of frozen modules."""
    group = init_backbone_group(
        rank, degrees, CPU, host=host, port=port, listener=listener, start_timeout_s=300, collective_timeout_s=300
    )
    for case, directory in jobs:
        trainer_of(group, case).save_checkpoint(directory)
    group.close()
    return [stored_frozen(directory) for _, directory in jobs]


@pytest.mark.parametrize("degrees", [Degrees(dp=2), Degrees(pp=2), Degrees(tp=2)], ids=str)
def test_it_has_one_digest_wherever_it_runs(tmp_path: Path, group: BackboneGroup, degrees: Degrees) -> None:
    trainer_of(group, INSIDE).save_checkpoint(tmp_path / "alone")
    expected = stored_frozen(tmp_path / "alone")["connector"]
    assert expected["origin"] == "random weights of seed 5" and len(expected["digest"]) == 16
    found, _ = run_ranks(degrees, [(BESIDE, tmp_path / "beside"), (INSIDE, tmp_path / "inside")], save)
    assert [each["connector"] for each in found] == [expected, expected]
    assert set(found[0]) == {"connector"} and set(found[1]) == {"connector", "encoders"}


@pytest.mark.parametrize(("before", "after"), [(BESIDE, INSIDE), (INSIDE, BESIDE), (BESIDE, BESIDE)])
def test_a_run_resumes_wherever_it_runs(tmp_path: Path, group: BackboneGroup, before: Case, after: Case) -> None:
    trainer = trainer_of(group, before)
    for _, parameter in trainer.model.named_parameters():
        parameter.data.mul_(1.5 if parameter.requires_grad else 1.0)
    trainer.save_checkpoint(tmp_path / "before")
    assert not any(name.startswith("connector.") for name in load_backbone_state(tmp_path / "before"))
    loaded = trainer_of(group, after, resume_from=tmp_path / "before")
    expected, found = (
        {name: each.full_tensor() for name, each in one.model.named_parameters() if each.requires_grad}
        for one in (trainer, loaded)
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    loaded.save_checkpoint(tmp_path / "after")
    assert stored_frozen(tmp_path / "after")["connector"] == stored_frozen(tmp_path / "before")["connector"]


@pytest.mark.parametrize(("before", "after"), [(BESIDE, INSIDE), (INSIDE, BESIDE), (BESIDE, BESIDE)])
def test_another_one_is_refused_with_both_digests(
    tmp_path: Path, group: BackboneGroup, before: Case, after: Case
) -> None:
    trainer_of(group, before).save_checkpoint(tmp_path / "before")
    said = (
        r"trained with a frozen connector of digest (?P<one>\w{16}) \(from random weights of seed 5\), which now has "
        r"digest (?!(?P=one))\w{16} \(from random weights of seed 6\)"
    )
    with pytest.raises(CheckpointError, match=said):
        trainer_of(group, after, seed=6, resume_from=tmp_path / "before")


@pytest.mark.parametrize(("trained", "exported"), [(BESIDE, INSIDE), (INSIDE, BESIDE), (BESIDE, BESIDE)])
def test_a_checkpoint_is_exported_under_either_mode(
    tmp_path: Path, group: BackboneGroup, trained: Case, exported: Case
) -> None:
    """A resume in another mode may not have saved yet."""
    trainer_of(group, trained).save_checkpoint(tmp_path / "checkpoint")
    family = family_from_config(exported.config)
    weights = CheckpointedWeights(family, exported.config, tmp_path / "checkpoint")
    family.export(weights.state, tmp_path)
    weights.check_frozen()
    found = AutoModelForImageTextToText.from_pretrained(tmp_path).state_dict()
    expected = family.load_joined().state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())

    other = exported.config.model_copy(update={"seed": 6})
    family = family_from_config(other)
    weights = CheckpointedWeights(family, other, tmp_path / "checkpoint")
    (tmp_path / "other").mkdir()
    family.export(weights.state, tmp_path / "other")
    with pytest.raises(CheckpointError, match="was trained with a frozen connector of digest"):
        weights.check_frozen()
