"""A resume goes on from a checkpoint that metrics and ledger reach, or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.controller.reach import last_without_gap, usable_checkpoint
from flowtrain.errors import ConfigError
from flowtrain.observability.run_dir import RunDir
from flowtrain.training import checkpoint_store
from tests.controller.audited import write_audit


def run_of(root: Path, *checkpoints: int, num_steps: int) -> RunDir:
    """A run with complete checkpoints and an audit of so many steps."""
    files = RunDir(root)
    for step in checkpoints:
        temporary = checkpoint_store.temporary_directory(files.checkpoints, step, "nonce")
        temporary.mkdir(parents=True)
        meta = checkpoint_store.CheckpointMeta(step, {}, "digest", 1, 1, "torch")
        checkpoint_store.commit(temporary, meta, keep=10)
    write_audit(files, num_steps, flush_every=6)
    return files


def cut(path: Path, step: int) -> None:
    """Cut a file, or a ledger's part files, to the steps up to ``step``."""
    if path.is_dir():
        for part in path.glob("part-*"):
            if int(part.stem.split("-")[2]) > step:
                part.unlink()
    else:
        path.write_text(
            "".join(line + "\n" for line in path.read_text().splitlines() if json.loads(line)["step"] <= step)
        )


def test_the_newest_checkpoint_is_used_if_both_reach_it(tmp_path: Path) -> None:
    files = run_of(tmp_path, 6, 12, num_steps=18)  # the run went on after its last checkpoint
    usable = usable_checkpoint(files)
    assert usable is not None and usable.meta.step == 12 and usable.older is None


def test_a_run_without_checkpoints_starts_anew(tmp_path: Path) -> None:
    assert usable_checkpoint(run_of(tmp_path, num_steps=6)) is None


@pytest.mark.parametrize("which", ["metrics", "ledger"])
def test_an_older_checkpoint_is_used_if_the_audit_reaches_only_that(tmp_path: Path, which: str) -> None:
    files = run_of(tmp_path, 3, 6, 12, num_steps=12)
    cut(getattr(files, which), 6)
    usable = usable_checkpoint(files)
    assert usable is not None and usable.meta.step == 6 and usable.directory.name == "step-00000006"
    assert usable.older is not None
    for part in ("step-00000012 is not used", "of step 12", f"{getattr(files, which)} has the steps up to 6"):
        assert part in usable.older


def test_the_owner_sets_later_checkpoints_aside_or_its_own_would_be_pruned(tmp_path: Path) -> None:
    files = run_of(tmp_path, 3, 6, 12, num_steps=12)
    cut(files.metrics, 6)
    usable_checkpoint(files)
    assert (files.checkpoints / "step-00000012").exists(), "only the owner renames"
    usable = usable_checkpoint(files, set_aside=True)
    assert usable is not None and checkpoint_store.latest_complete(files.checkpoints) == usable.directory
    temporary = checkpoint_store.temporary_directory(files.checkpoints, 7, "nonce")
    temporary.mkdir()
    meta = checkpoint_store.CheckpointMeta(7, {}, "digest", 1, 1, "torch")
    assert checkpoint_store.commit(temporary, meta, keep=1).exists()
    names = sorted(path.name for path in files.checkpoints.iterdir())
    assert names[0] == "step-00000007" and names[1].startswith("unreached-step-00000012-") and len(names) == 2


@pytest.mark.parametrize("which", ["metrics", "ledger"])
@pytest.mark.parametrize("missing", [False, True], ids=["cut", "missing"])
def test_without_such_a_checkpoint_the_resume_is_refused(tmp_path: Path, which: str, missing: bool) -> None:
    files = run_of(tmp_path, 12, num_steps=12)
    path: Path = getattr(files, which)
    if missing:
        path.rename(tmp_path / "elsewhere")
    else:
        cut(path, 6)
    with pytest.raises(ConfigError) as caught:
        usable_checkpoint(files)
    reach = 0 if missing else 6
    for part in (f"{path} has the steps up to {reach}", "is of step 12", "flowtrain export", "another name"):
        assert part in str(caught.value)


def test_a_part_of_the_ledger_that_cannot_be_read_counts_as_missing(tmp_path: Path) -> None:
    files = run_of(tmp_path, 6, 12, num_steps=12)
    part = files.ledger / "part-00000007-00000012.parquet"
    part.write_bytes(part.read_bytes()[:-20])
    usable = usable_checkpoint(files)
    assert usable is not None and usable.meta.step == 6


def test_a_gap_ends_the_reach(tmp_path: Path) -> None:
    files = run_of(tmp_path, 6, 12, num_steps=12)
    lines = files.metrics.read_text().splitlines()
    files.metrics.write_text("\n".join([*lines[:8], *lines[9:]]) + "\n")
    usable = usable_checkpoint(files)
    assert usable is not None and usable.meta.step == 6


@given(st.lists(st.integers(0, 30)))
def test_the_last_step_without_a_gap(steps: list[int]) -> None:
    last = last_without_gap(steps)
    assert set(range(1, last + 1)) <= set(steps) and last + 1 not in steps
