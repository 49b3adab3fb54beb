"""The checkpoint directory: kills at any point, pruning, damaged checkpoints. No torch."""

from __future__ import annotations

import errno
import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flowtrain.errors import CheckpointError
from flowtrain.training import checkpoint_store as store
from flowtrain.training.checksums import FileSum

META = store.CheckpointMeta(
    step=0, state={"sampler": {"next": 7}, "scale": 0.1}, config_digest="d", dp_size=2, num_threads=1, torch_version="2"
)


def write(checkpoints: Path, step: int) -> Path:
    temporary = store.temporary_directory(checkpoints, step, "nonce")
    temporary.mkdir(parents=True, exist_ok=True)
    (temporary / "shard").write_bytes(bytes(step + 1))
    return temporary


def write_and_commit(checkpoints: Path, step: int, keep: int = 2) -> Path:
    return store.commit(write(checkpoints, step), replace(META, step=step), keep)


def test_commit_names_prunes_and_keeps_the_driver_state(tmp_path):
    for step in (2, 4, 10):
        final = write_and_commit(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000010"]
    assert store.latest_complete(tmp_path) == final
    meta = store.read_meta(final)
    assert (meta.step, meta.state, meta.files) == (10, META.state, {"shard": FileSum(11, "6b87b1ec")})


def test_a_checkpoint_from_before_partitions_and_modes_is_read(tmp_path):
    final = write_and_commit(tmp_path, 2)
    values = json.loads((final / store.META_FILE).read_text())
    for name in ("crc32", "partition", "mode", "trained", "metrics"):
        del values[name]
    (final / store.META_FILE).write_text(store._sealed({**values, "num_chunks": 2}))
    meta = store.read_meta(final)
    assert (meta.partition, meta.mode, meta.trained) == ("chunks=2", "decoupled", ())
    assert store.latest_complete(tmp_path) == final


def commit_with(checkpoints: Path, step: int, keep_best: str | None = "eval_loss", **metrics: float) -> Path:
    meta = replace(META, step=step, metrics=metrics)
    return store.commit(write(checkpoints, step), meta, 1, keep_best)


def steps_in(checkpoints: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in checkpoints.iterdir())


def test_the_best_stays_until_a_better_one_comes(tmp_path):
    kept = []
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 1.0), (5, 0.5), (6, 0.75)):
        commit_with(tmp_path, step, eval_loss=loss)
        kept.append(steps_in(tmp_path))
    assert kept == [[1], [2], [2, 3], [2, 4], [5], [5, 6]], "of equal ones the earlier stays"
    assert [path.name[-1] for path in store.best_first(tmp_path, "eval_loss")] == ["5", "6"]
    assert store.best_first(tmp_path, "eval_loss/cats") == []


def test_a_resume_prunes_by_what_earlier_starts_measured(tmp_path):
    commit_with(tmp_path, 1, eval_loss=0.5)
    commit_with(tmp_path, 2, eval_loss=0.9)
    commit_with(tmp_path, 3)
    assert steps_in(tmp_path) == [1, 3], "a checkpoint without the metric is no candidate"
    commit_with(tmp_path, 4, keep_best=None, eval_loss=0.1)
    assert steps_in(tmp_path) == [4], "the setting of the last start decides"


def test_a_damaged_best_gives_way_to_the_next(tmp_path):
    best = commit_with(tmp_path, 1, eval_loss=0.5)
    (best / "shard").write_bytes(b"")
    commit_with(tmp_path, 2, eval_loss=0.9)
    commit_with(tmp_path, 3, eval_loss=1.0)
    assert steps_in(tmp_path) == [2, 3]


@pytest.mark.parametrize("call", ["sync_directory", "_prune"])
def test_a_commit_that_failed_after_its_rename_succeeds_again(tmp_path, monkeypatch, call):
    temporary, real = write(tmp_path, 2), getattr(store, call)

    def refuse(*args):
        if not temporary.exists():
            raise OSError(errno.EIO, "Input/output error")
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(store, call, refuse)
        with pytest.raises(OSError, match="Input/output"):
            store.commit(temporary, replace(META, step=2), keep=2)
    assert store.commit(temporary, replace(META, step=2), keep=2) == store.latest_complete(tmp_path)


def test_a_commit_leaves_the_next_write_alone(tmp_path):
    """Ranks write the next checkpoint while the driver still commits the last."""
    last, under_way = write(tmp_path, 2), write(tmp_path, 4)
    store.commit(last, replace(META, step=2), keep=1)
    assert (under_way / "shard").exists()


def test_a_kill_before_the_commit_leaves_the_last_complete_one(tmp_path):
    first = write_and_commit(tmp_path, 2)
    left_behind = write(tmp_path, 4)
    assert store.latest_complete(tmp_path) == first
    store.remove_temporaries(tmp_path)
    assert not left_behind.exists() and first.exists()


@pytest.mark.parametrize("call", ["os.fsync", "pathlib.Path.rename", "shutil.rmtree"])
@pytest.mark.parametrize("keep", [1, 2])
def test_a_kill_anywhere_in_the_commit_leaves_a_complete_one(tmp_path, call, keep):
    """The process dies at the n-th call of each kind, for every n that happens."""
    for n in range(1, 8):
        checkpoints = tmp_path / str(n)
        for step in (1, 2):
            write_and_commit(checkpoints, step, keep)
        temporary = write(checkpoints, 3)
        died = _commit_and_die(temporary, call, n, keep)
        latest = store.latest_complete(checkpoints)
        assert latest is not None and latest.name in {"step-00000002", "step-00000003"}
        assert write_and_commit(checkpoints, 4, keep) == store.latest_complete(checkpoints)
        store.remove_temporaries(checkpoints)
        assert len(list(checkpoints.iterdir())) == keep
        if not died:
            return
    raise AssertionError("the commit never came to its end")


def _commit_and_die(temporary: Path, call: str, n: int, keep: int) -> bool:
    class Died(BaseException):
        pass

    module_name, _, name = call.rpartition(".")
    holder = {"os": sys.modules["os"], "pathlib.Path": Path, "shutil": sys.modules["shutil"]}[module_name]
    original, calls = getattr(holder, name), 0

    def dying(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == n:
            raise Died
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holder, name, dying)
        try:
            store.commit(temporary, replace(META, step=3), keep)
        except Died:
            return True
    return False


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: (path / "shard").unlink(), "no file"),
        (lambda path: (path / "shard").write_bytes(b""), "0 bytes"),
        (lambda path: (path / store.META_FILE).write_text("{"), "cannot be read"),
        (lambda path: (path / store.META_FILE).unlink(), "cannot be read"),
        (lambda path: (path / store.META_FILE).write_text(json.dumps({"schema": 99})), r"schema \(99\)"),
    ],
)
def test_damaged_checkpoints_are_skipped_aloud_and_replaced(tmp_path, caplog, damage, said):
    first, second = write_and_commit(tmp_path, 1), write_and_commit(tmp_path, 2)
    damage(second)
    with caplog.at_level(logging.WARNING):
        assert store.latest_complete(tmp_path) == first
    assert "step-00000002 is skipped" in caplog.text
    with pytest.raises(CheckpointError, match=said):
        raise CheckpointError(store.problem_of(second))
    assert write_and_commit(tmp_path, 2) == store.latest_complete(tmp_path)


def test_nothing_yet(tmp_path):
    assert store.latest_complete(tmp_path / "absent") is None
    store.remove_temporaries(tmp_path / "absent")


def test_a_step_reached_again_keeps_what_is_there(tmp_path):
    first = write_and_commit(tmp_path, 5)
    inode = first.stat().st_ino
    assert write_and_commit(tmp_path, 5).stat().st_ino == inode
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def test_the_store_needs_no_torch():
    code = "import sys, flowtrain.training.checkpoint_store; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
