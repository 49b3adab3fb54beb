"""Saves beside training: the state of one instant, one save at a time, full disks, and kills at any moment."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from flowtrain.errors import CheckpointError
from flowtrain.models.parallel_layers import local_shard
from flowtrain.training import checkpoint, checkpoint_store, saver
from flowtrain.training.mesh import init_backbone_group
from flowtrain.training.saver import CheckpointSaver, writes_in_background
from flowtrain.training.snapshot import HostBuffers, Snapshot
from flowtrain.training.trainer import Trainer
from flowtrain.types.memory import HostMemory
from flowtrain.types.plan import Degrees
from tests.training.ranks import Job, TinyFamily, make_config, run_ranks
from tests.training.test_checkpoint import CONFIG, META, TINY, resume
from tests.training.test_trainer import STEPS_DP2

pytestmark = pytest.mark.processes


@pytest.fixture
def group():
    group = init_backbone_group(0, Degrees(), torch.device("cpu"))
    yield group
    group.close()


@pytest.fixture
def trainer(group):
    return Trainer(CONFIG, TINY, group, num_steps=10)


class Reports(list):
    def __call__(self, step, directory, problem):
        self.append((step, problem))


def make_saver(trainer, *, background=True, write=None, reports=None, record=lambda *args, **kwargs: None):
    reports = Reports() if reports is None else reports
    return CheckpointSaver(
        trainer.group,
        trainer.snapshot,
        write or trainer.write_snapshot,
        reports,
        record,
        background=background,
        saved_step=0,
    )


@torch.no_grad()
def fill(trainer, value):
    for _, parameter in trainer.model.named_parameters():
        parameter.fill_(value)


def values_in(directory):
    return {float(value) for tensor in checkpoint.load_backbone_state(directory).values() for value in tensor.unique()}


def test_what_is_written_is_the_state_at_the_save(tmp_path, trainer):
    goes_on, reports, spans = threading.Event(), Reports(), []

    def write(directory, snapshot):
        assert goes_on.wait(60)
        return trainer.write_snapshot(directory, snapshot)

    beside = make_saver(trainer, write=write, reports=reports, record=lambda name, *args, **kwargs: spans.append(name))
    torch.manual_seed(5)
    fill(trainer, 3.0)
    beside.save(1, tmp_path / "a")
    expected = torch.rand(3)
    fill(trainer, 4.0)  # training goes on before a byte is written
    assert beside.step == 1 and not reports
    goes_on.set()
    beside.save(2, tmp_path / "b")
    assert beside.wait() is None and beside.wait() is None
    assert reports == [(1, None), (2, None)]
    assert values_in(tmp_path / "a") == {3.0} and values_in(tmp_path / "b") == {4.0}
    assert spans.count("checkpoint_copy") == 2 and spans.count("checkpoint_write") == 2
    trainer.load_checkpoint(tmp_path / "a")
    assert torch.equal(torch.rand(3), expected), "the random state is of the same instant"


def test_an_accelerator_without_a_number_is_the_one_of_the_training_thread(tmp_path, trainer, monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    group = replace(trainer.group, device=torch.device("cuda"))
    beside = CheckpointSaver(
        group,
        lambda buffers: Snapshot({}, {}, {}),
        lambda directory, snapshot: None,
        Reports(),
        lambda *args, **kwargs: None,
        background=True,
        saved_step=0,
    )
    beside.save(1, tmp_path)
    assert beside.wait() is None and chosen == [3]


def test_a_save_waits_for_the_one_before_and_uses_its_memory_again(tmp_path, trainer):
    seen, running, overlap = [], threading.Lock(), []

    def write(directory, snapshot):
        overlap.append(not running.acquire(blocking=False))
        seen.append({name: tensor.data_ptr() for name, tensor in snapshot.copies.items()})
        running.release()

    beside = make_saver(trainer, write=write)
    for step in (1, 2, 3):
        beside.save(step, tmp_path)
    beside.wait()
    assert not any(overlap) and seen[0] == seen[1] == seen[2] and len(seen[0]) > 5
    live = {local_shard(tensor).data_ptr() for tensor in trainer.snapshot(None).tensors.values()}
    assert not live & set(seen[0].values())


def test_the_memory_of_the_first_save_is_there_before_it(tmp_path, trainer, monkeypatch):
    def write(directory, snapshot):
        seen.append({name: tensor.data_ptr() for name, tensor in snapshot.copies.items()})

    seen, reserved = [], []
    reserve = HostBuffers.reserve
    monkeypatch.setattr(HostBuffers, "reserve", lambda self, tensors: (reserve(self, tensors), reserved.append(self)))
    beside = make_saver(trainer, write=write)
    for _ in range(2):
        beside.prepare()
    assert beside.step == 0
    beside.save(1, tmp_path)
    assert beside.wait() is None and len(reserved) == 1
    kept = reserved[0].copy(trainer.snapshot(None).tensors)
    assert seen == [{name: tensor.data_ptr() for name, tensor in kept.items()}]
    make_saver(trainer, background=False).prepare()
    assert len(reserved) == 1, "nothing is copied"


def test_a_state_that_does_not_change_is_written_without_a_copy(tmp_path, trainer):
    seen = []
    beside = make_saver(trainer, write=lambda directory, snapshot: seen.append(snapshot.copies))
    beside.save(1, tmp_path, in_place=True)
    assert beside.wait() is None and seen == [None] and beside.step == 1


@pytest.mark.parametrize("background", [False, True])
def test_a_snapshot_is_kept_before_its_checkpoint_is_written_and_alone(tmp_path, trainer, background):
    goes_on, done = threading.Event(), []

    def write(directory, snapshot):
        done.append("written")

    def keep(step, snapshot):
        assert goes_on.wait(60)
        done.append((step, {float(value) for name in snapshot.tensors for value in snapshot.values(name).unique()}))

    beside = make_saver(trainer, background=background, write=write)
    fill(trainer, 3.0)
    if not background:
        goes_on.set()
    beside.save(1, tmp_path, keep)
    fill(trainer, 4.0)
    if background:
        assert not beside.is_free(), "training must not wait for it"
        goes_on.set()
    beside.wait()
    assert beside.is_free()
    beside.keep(2, keep)
    fill(trainer, 5.0)
    assert beside.wait() is None and beside.step == 1, "a snapshot is no checkpoint"
    assert done == [(1, {3.0}), "written", (2, {4.0})]


def test_what_ends_a_snapshot_ends_training(trainer):
    def keep(step, snapshot):
        raise ZeroDivisionError("a bug")

    beside = make_saver(trainer)
    beside.keep(1, keep)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        while not beside.is_free():
            pass


@pytest.mark.parametrize("background", [False, True])
def test_a_failed_save_is_reported_and_tried_again(tmp_path, trainer, background):
    reports, outcomes = Reports(), iter([None, "no room", None])
    beside = make_saver(trainer, background=background, write=lambda *_: next(outcomes), reports=reports)
    for step in (2, 4):
        beside.save(step, tmp_path)
        assert beside.step == step
        beside.wait()
    assert beside.step == 2, "step 4 is not saved"
    beside.save(4, tmp_path)
    assert beside.wait() is None and beside.step == 4
    assert reports == [(2, None), (4, "no room"), (4, None)]


@pytest.mark.parametrize("background", [False, True])
def test_a_bug_while_writing_ends_training(tmp_path, trainer, background):
    def write(directory, snapshot):
        raise ZeroDivisionError("a bug")

    beside = make_saver(trainer, background=background, write=write)
    beside.save(1, tmp_path)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        beside.save(2, tmp_path)


def test_auto_asks_the_host_memory(monkeypatch, group, caplog):
    monkeypatch.setattr(saver, "host_memory", lambda: HostMemory(100, 80, None, None))
    assert writes_in_background("auto", 40, group)
    assert not caplog.records
    assert not writes_in_background("auto", 41, group)
    assert "a node's copies need 41 bytes, more than half of the 80 bytes" in caplog.text
    assert writes_in_background(True, 1000, group) and not writes_in_background(False, 1, group)


# --- several ranks ---------------------------------------------------------------------------------------------------


def test_training_and_checkpoint_of_two_ranks_are_as_without_the_other(tmp_path):
    undisturbed = run_ranks(2, Job(CONFIG, STEPS_DP2))[0]
    temporary = checkpoint_store.temporary_directory(tmp_path, 2, "nonce")
    beside = run_ranks(2, Job(CONFIG, STEPS_DP2, save_to=temporary, save_after=2))[0]
    assert beside.results == undisturbed.results
    resumed = resume(checkpoint_store.commit(temporary, META, keep=2), 2)
    assert resumed.results == undisturbed.results[2:]
    for name, weight in undisturbed.weights.items():
        assert np.array_equal(resumed.weights[name], weight), name


def save_with_a_limit(rank, degrees, host, port, listener, directory):
    """A rank's process; the kernel refuses rank 1 files of more than 2,000 bytes at the first try."""
    group = init_backbone_group(rank, degrees, torch.device("cpu"), host=host, port=port, listener=listener)
    trainer = Trainer(CONFIG, TINY, group, num_steps=10)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    problems = [trainer.write_snapshot(directory, trainer.snapshot(None))]
    remains = directory.exists()
    dist.barrier(group=group.checkpoint_group)  # the other rank's second try makes the directory anew
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    problems.append(trainer.write_snapshot(directory, trainer.snapshot(None)))
    group.close()
    return problems, remains


def test_a_refused_write_on_one_rank_is_the_failure_of_all_and_the_next_try_succeeds(tmp_path):
    directory = checkpoint_store.temporary_directory(tmp_path, 2, "nonce")
    outcomes = run_ranks(2, directory, save_with_a_limit)
    problem = outcomes[0][0][0]
    assert problem.startswith("rank 1: [Errno 27] File too large; the checkpoint needs ")
    assert f"bytes are free in {tmp_path}" in problem
    assert outcomes == [([problem, None], False)] * 2
    final = checkpoint_store.commit(directory, META, keep=1)
    assert checkpoint_store.corruption_of(final) is None


@pytest.mark.parametrize("name", ["random-00000.pt", "tied.json", "checksums.json", ".metadata.tmp"])
def test_a_refused_small_file_is_a_failure_too(tmp_path, trainer, monkeypatch, name):
    """The disk is full for one of the files that are not shards."""
    monkeypatch.setattr(Path, "open", refusing(Path.open, name))
    problem = trainer.write_snapshot(tmp_path / "x", trainer.snapshot(None))
    assert "rank 0: " in problem and "No space left on device" in problem
    assert not (tmp_path / "x").exists()
    monkeypatch.undo()
    assert trainer.write_snapshot(tmp_path / "x", trainer.snapshot(None)) is None


def refusing(opens, name):
    def open_or_refuse(path, mode="r", *args, **kwargs):
        if path.name == name and "r" not in mode:
            raise OSError(28, os.strerror(28), str(path))
        return opens(path, mode, *args, **kwargs)

    return open_or_refuse


# --- flipped bits ----------------------------------------------------------------------------------------------------


def test_a_flipped_bit_in_any_file_of_a_checkpoint_is_found(tmp_path):
    directories = []
    for step in (1, 2):
        temporary = checkpoint_store.temporary_directory(tmp_path, step, "nonce")
        run_ranks(2, Job(CONFIG, STEPS_DP2[:step], save_to=temporary))
        directories.append(checkpoint_store.commit(temporary, replace(META, step=step), keep=2))
    before, last = directories
    rng, names = random.Random(3), sorted(path.name for path in last.iterdir())
    assert names == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "meta.json",
        "random-00000.pt",
        "random-00001.pt",
        "tied.json",
    ]
    for path in sorted(last.iterdir()):
        content = path.read_bytes()
        for bit in (0, 8 * len(content) - 1, *(rng.randrange(8 * len(content)) for _ in range(5))):
            changed = bytearray(content)
            changed[bit // 8] ^= 1 << bit % 8
            path.write_bytes(changed)
            assert next(checkpoint_store.intact_newest_first(tmp_path)) == before, (path.name, bit)
            path.write_bytes(content)
    assert next(checkpoint_store.intact_newest_first(tmp_path)) == last


# --- kills -----------------------------------------------------------------------------------------------------------


def save_for_ever(checkpoints, connection):
    """A rank that saves step after step, all weights being the step, and tells which are complete."""
    group = init_backbone_group(0, Degrees(), torch.device("cpu"))
    trainer = Trainer(CONFIG, TINY, group, num_steps=10)

    def report(step, directory, problem):
        assert problem is None, problem
        checkpoint_store.commit(directory, replace(META, step=step), keep=2)
        connection.send(step)

    beside = make_saver(trainer, reports=report)
    for step in range(1, 100_000):
        fill(trainer, float(step))
        beside.save(step, checkpoint_store.temporary_directory(checkpoints, step, "nonce"))


def test_a_kill_at_any_moment_leaves_a_checkpoint_that_loads(tmp_path):
    context, rng = multiprocessing.get_context("forkserver"), random.Random(17)
    context.set_forkserver_preload(["tests.training.ranks"])
    for turn in range(4):
        checkpoints = tmp_path / str(turn)
        end, other_end = context.Pipe(duplex=False)
        victim = context.Process(target=save_for_ever, args=(checkpoints, other_end))
        victim.start()
        other_end.close()
        complete = 0
        for _ in range(rng.randint(1, 4)):
            complete = end.recv()
        threading.Event().wait(rng.uniform(0.0, 0.03))
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        last = next(checkpoint_store.intact_newest_first(checkpoints))
        step = checkpoint_store.read_meta(last).step
        assert step >= complete and values_in(last) == {float(step)}
        checkpoint_store.remove_temporaries(checkpoints)
        assert all(path.name.startswith("step-") for path in checkpoints.iterdir())


# --- frozen modules ------------------------------------------------------------------------------------------------


FROZEN = make_config(model={"freeze": ["backbone"]})
WITH_TWO_HEADS = TinyFamily(freeze=("backbone",), num_kv_heads=2)


def save_frozen(checkpoints, degrees):
    temporary = checkpoint_store.temporary_directory(checkpoints, 0, "nonce")
    run_ranks(degrees, Job(FROZEN, (), WITH_TWO_HEADS, save_to=temporary))
    return temporary


def test_a_frozen_module_is_named_by_origin_and_digest_at_any_degrees(tmp_path):
    found = []
    for name, degrees in (("a", Degrees()), ("b", Degrees(dp=2)), ("c", Degrees(tp=2)), ("d", Degrees(pp=2))):
        directory = save_frozen(tmp_path / name, degrees)
        found.append(checkpoint.stored_frozen(directory))
        assert {key.split(".")[0] for key in checkpoint.load_backbone_state(directory)} == {"connector"}
    assert found[0]["backbone"]["origin"] == "backbone.path unused" and len(found[0]["backbone"]["digest"]) == 16
    beside = checkpoint_store.temporary_directory(tmp_path / "e", 1, "nonce")
    run_ranks(2, Job(FROZEN, STEPS_DP2, WITH_TWO_HEADS, save_to=beside, save_after=1))
    found.append(checkpoint.stored_frozen(beside))
    assert found == [found[0]] * 5


def test_a_resume_takes_frozen_weights_from_their_origin_and_compares_them(tmp_path, group):
    family = TinyFamily(freeze=("backbone",))
    steps = STEPS_DP2
    temporary = checkpoint_store.temporary_directory(tmp_path, 2, "nonce")
    run_ranks(2, Job(FROZEN, steps[:2], family, save_to=temporary))
    undisturbed = run_ranks(2, Job(FROZEN, steps, family))[0]
    resumed = run_ranks(2, Job(FROZEN, steps[2:], family, first_step=3, load_from=temporary))[0]
    assert resumed.results == undisturbed.results[2:]
    assert all(np.array_equal(resumed.weights[name], weight) for name, weight in undisturbed.weights.items())
    other = TinyFamily(freeze=("backbone",), num_heads=2, seed=12)
    with pytest.raises(CheckpointError, match="trained with a frozen backbone of digest .* which now has digest"):
        Trainer(FROZEN, other, group, num_steps=10, resume_from=temporary)


def test_a_checkpoint_with_frozen_weights_in_it_loads_too(tmp_path, group):
    """Those of schema 1 have them."""
    Trainer(CONFIG, TINY, group, num_steps=10).save_checkpoint(tmp_path)
    stored = checkpoint.load_backbone_state(tmp_path)
    other = TinyFamily(freeze=("backbone",), seed=12)
    loaded = Trainer(FROZEN, other, group, num_steps=10, resume_from=tmp_path)
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(local_shard(parameter), stored[name]), name
