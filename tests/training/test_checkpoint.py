"""Checkpoints: exact resume, other world sizes, kills, and nothing that runs pickled code."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, TensorStorageMetadata

from flowtrain.errors import CheckpointError
from flowtrain.training import checkpoint, checkpoint_format, checkpoint_store
from flowtrain.training.checkpoint_store import CheckpointMeta
from flowtrain.training.mesh import init_backbone_group
from flowtrain.training.trainer import Trainer
from flowtrain.types.plan import Degrees
from tests.training.ranks import Job, Outcome, TinyFamily, make_config, run_oracle, run_ranks
from tests.training.test_trainer import STEPS_DP1, STEPS_DP2, assert_equal_training

pytestmark = pytest.mark.processes

META = CheckpointMeta(2, {"sampler": {"next": 16}}, "digest", dp_size=2, num_threads=1, torch_version="2")
TINY = TinyFamily()
CONFIG = make_config(training={"weight_decay": 0.1})


def save_after_two_steps(checkpoints: Path, world_size: int, family: TinyFamily = TINY) -> Path:
    steps = STEPS_DP2[:2] if world_size == 2 else STEPS_DP1[:2]
    temporary = checkpoint_store.temporary_directory(checkpoints, 2, "nonce")
    run_ranks(world_size, Job(CONFIG, steps, family, save_to=temporary))
    return checkpoint_store.commit(temporary, META, keep=2)


def resume(directory: Path, world_size: int, family: TinyFamily = TINY) -> Outcome:
    steps = STEPS_DP2[2:] if world_size == 2 else STEPS_DP1[2:]
    return run_ranks(world_size, Job(CONFIG, steps, family, first_step=3, load_from=directory))[0]


@pytest.mark.parametrize(("world_size", "tied"), [(1, True), (2, True), (2, False)])
def test_resume_in_new_processes_is_exact_to_the_bit(tmp_path, world_size, tied):
    family = TinyFamily(tied=tied)
    resumed = resume(save_after_two_steps(tmp_path, world_size, family), world_size, family)
    steps = STEPS_DP2 if world_size == 2 else STEPS_DP1
    undisturbed = run_ranks(world_size, Job(CONFIG, steps, family))[0]
    assert resumed.results == undisturbed.results[2:]
    for name, weight in undisturbed.weights.items():
        assert np.array_equal(resumed.weights[name], weight), name


def test_a_checkpoint_of_two_ranks_resumes_on_one(tmp_path):
    resumed = resume(save_after_two_steps(tmp_path, 2), 1)
    undisturbed = run_ranks(1, Job(CONFIG, STEPS_DP1))[0]
    undisturbed.results, undisturbed.gradients = undisturbed.results[2:], undisturbed.gradients[2:]
    assert_equal_training(resumed, undisturbed, 1e-4)


def test_weights_load_without_a_process_group(tmp_path):
    job = Job(CONFIG, (), save_to=checkpoint_store.temporary_directory(tmp_path, 0, "nonce"))
    run_ranks(2, job)
    state = checkpoint.load_backbone_state(job.save_to)
    expected = TinyFamily().load_backbone()
    assert state.keys() == expected.state_dict().keys()
    assert state["language_model.lm_head.weight"] is state["language_model.model.embed_tokens.weight"]
    expected_weights = run_oracle(Job(CONFIG, ())).weights
    assert all(np.array_equal(state[name].numpy(), weight) for name, weight in expected_weights.items())


@pytest.fixture
def fresh_trainer():
    """Trainers of this very process, on a group of one."""
    group = init_backbone_group(0, Degrees(), torch.device("cpu"))
    yield lambda family=TINY: Trainer(CONFIG, family, group, num_steps=10)
    group.close()


def test_another_model_is_refused(tmp_path, fresh_trainer):
    fresh_trainer().save_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"of shape \[16, 6\], the model \[24, 6\]"):
        fresh_trainer(TinyFamily(hidden_size=24)).load_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"has no model\.language_model\.lm_head\.weight"):
        fresh_trainer(TinyFamily(tied=False)).load_checkpoint(tmp_path)


def test_random_state_is_restored(tmp_path, fresh_trainer):
    trainer = fresh_trainer()
    torch.manual_seed(5)
    trainer.save_checkpoint(tmp_path)
    expected = torch.rand(3)
    torch.manual_seed(6)
    trainer.load_checkpoint(tmp_path)
    assert torch.equal(torch.rand(3), expected)


class Payload:
    """Runs a command when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("pwned",)


class Attribute:
    """Is an attribute of a class of the index when it is unpickled."""

    def __init__(self, owner: type, *name: object) -> None:
        self._named = owner, *name

    def __reduce__(self):
        return getattr, self._named


def test_python_up_to_3_11_3_names_a_member_of_an_enumeration_as_an_attribute(tmp_path):
    for member in _MEM_FORMAT_ENCODING:
        (tmp_path / ".metadata").write_bytes(pickle.dumps(Attribute(_MEM_FORMAT_ENCODING, member.name)))
        with (tmp_path / ".metadata").open("rb") as file:
            assert checkpoint_format._IndexUnpickler(file).load() is member


FOREIGN = [Payload(), Attribute(_MEM_FORMAT_ENCODING, "mro"), Attribute(TensorStorageMetadata, "__init__")]
FOREIGN += [Attribute(_MEM_FORMAT_ENCODING), Attribute(_MEM_FORMAT_ENCODING, []), Attribute(TensorStorageMetadata, 1)]


@pytest.mark.parametrize("content", [*map(pickle.dumps, FOREIGN), pickle.dumps({"a": 1})[:-3], b"", None])
def test_an_index_with_foreign_content_is_refused_and_not_run(tmp_path, monkeypatch, fresh_trainer, content):
    monkeypatch.chdir(tmp_path)
    trainer, directory = fresh_trainer(), tmp_path / "checkpoint"
    trainer.save_checkpoint(directory)
    if content is None:
        (directory / ".metadata").unlink()
    else:
        (directory / ".metadata").write_bytes(content)
    for load in (trainer.load_checkpoint, checkpoint.load_backbone_state):
        with pytest.raises(CheckpointError, match="no readable index"):
            load(directory)
    assert not (tmp_path / "pwned").exists()


def test_only_tensors_are_stored(tmp_path, fresh_trainer):
    """Anything else torch would unpickle without restraint."""
    fresh_trainer().save_checkpoint(tmp_path)
    entries = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert entries and all(isinstance(entry, TensorStorageMetadata) for entry in entries.values())


def test_an_unwritable_place_is_said(tmp_path, fresh_trainer):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        CheckpointError,
        match=r"could not be written: rank 0: .*Not a directory.* needs [\d,]+ bytes, [\d,]+ bytes are free",
    ):
        fresh_trainer().save_checkpoint(tmp_path / "file" / "checkpoint")
