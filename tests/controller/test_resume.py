"""Where a resumed run goes on, and where it cannot."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

import flowtrain
from flowtrain.config.load import override_config
from flowtrain.config.resume import Change
from flowtrain.config.run import RunConfig
from flowtrain.controller.dry_run import DryRunReport, foresee_memory
from flowtrain.controller.predict import image_tokens
from flowtrain.controller.prepare import RunSpec, prepare
from flowtrain.controller.resume import Resumption, check_goes_on, find_resume_point, foresee_resume
from flowtrain.data.feed import sampler_from_config
from flowtrain.errors import ConfigError
from flowtrain.flow.units import unit_sequence
from flowtrain.observability.run_dir import RunDir, open_run_dir
from flowtrain.training import checkpoint_store
from tests.controller.audited import write_audit
from tests.e2e.worlds import World, tiny_config

NUM_ROWS, BATCH = 20, 8


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("start")
    world = World()
    world.add_mixed(NUM_ROWS)
    world.write(directory / "train.parquet")
    return directory


def config_of(data: Path, num_epochs: float, order: str) -> RunConfig:
    overrides = ["training.max_steps=null", f"training.num_epochs={num_epochs}", f"data.order={order}"]
    return tiny_config(data, data / "train.parquet", "start", *overrides, f"training.global_batch_size={BATCH}")


def checkpointed(run_spec: RunSpec, root: Path, step: int, trained: int) -> RunDir:
    """A run whose last checkpoint is behind ``step``, with so many positions trained."""
    files = RunDir(root)
    sampler = sampler_from_config(run_spec.config, [np.array([0, size]) for size in run_spec.source_sizes])
    sampler.take(trained)
    state = {**sampler.state().to_dict(), **({"consumed": []} if run_spec.config.data.order == "arrival" else {})}
    temporary = checkpoint_store.temporary_directory(files.checkpoints, step, "nonce")
    temporary.mkdir(parents=True)
    meta = checkpoint_store.CheckpointMeta(step, {"sampler": state}, "digest", 1, 1, "torch")
    checkpoint_store.commit(temporary, meta, keep=2)
    write_audit(files, step)
    return files


@pytest.mark.parametrize("order", ["deterministic", "arrival"])
def test_behind_a_partial_step_a_longer_run_is_refused(data: Path, tmp_path: Path, order: str) -> None:
    """What it would run next does not begin where the sampler stands."""
    first = prepare(config_of(data, 1, order))
    assert (first.num_steps, first.total_positions) == (3, NUM_ROWS)
    files = checkpointed(first, tmp_path, 3, NUM_ROWS)
    longer = prepare(config_of(data, 2, order))
    upcoming = next(unit_sequence(longer.num_steps, BATCH, longer.total_positions, start_step=3))
    start = find_resume_point(files, longer, ())
    assert start.sampler_state is not None and upcoming.first_position != start.sampler_state.next_position
    with pytest.raises(
        ConfigError, match=r"20 positions are trained, but step 4 begins at position 24.*num_epochs \(now 2"
    ):
        check_goes_on(files, longer)


def test_all_others_go_on(data: Path, tmp_path: Path) -> None:
    check_goes_on(RunDir(tmp_path / "new"), prepare(config_of(data, 1, "arrival")))
    first, longer = (prepare(config_of(data, num_epochs, "deterministic")) for num_epochs in (1, 2))
    check_goes_on(checkpointed(first, tmp_path / "done", 3, NUM_ROWS), first)
    check_goes_on(checkpointed(first, tmp_path / "before", 2, 2 * BATCH), longer)
    even = prepare(config_of(data, 0.8, "deterministic"))
    assert even.total_positions == 2 * BATCH
    check_goes_on(checkpointed(even, tmp_path / "even", 2, 2 * BATCH), longer)


def test_a_resume_is_foreseen_and_refused_as_it_would_be_and_changes_nothing(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def config(num_epochs: float, *overrides: str) -> RunSpec:
        values = config_of(data, num_epochs, "deterministic").model_dump()
        return prepare(override_config(RunConfig.model_validate(values), [f"runs_dir={tmp_path}", *overrides]))

    first = config(1)
    root = tmp_path / "start"
    assert foresee_resume(first) == Resumption(root, None, (), ())
    open_run_dir(first.config, resume=False)
    assert foresee_resume(first) == Resumption(root, None, (), ())
    checkpointed(first, root, 2, 2 * BATCH)
    before = sorted(root.rglob("*"))
    longer = foresee_resume(config(2, "pool.feeder_segment_nbytes=33554432", "backbone.data_parallel_size=2"))
    assert longer.step == 2 and sorted(root.rglob("*")) == before
    assert Change("training.num_epochs", 1.0, 2.0) in longer.changes and len(longer.changes) == 3
    assert any("degrees" in line and "losses agree only closely" in line for line in longer.inexact)
    RunDir(root).write_plan(asdict(first.plan))
    nbytes = first.plan.feeder.segment_nbytes
    assert nbytes and first.config.pool.feeder_segment_nbytes is None
    same = foresee_resume(config(1, f"pool.feeder_segment_nbytes={nbytes}"))
    assert same.changes == (), "the run had it already"
    (encoder,) = first.config.encoders
    split = foresee_resume(config(1, f"encoders.{encoder}.tensor_parallel_size=2"))
    assert split.inexact[-1] == f"encoders.{encoder}.tensor_parallel_size was 1, is now 2: losses agree only closely"
    hybrid = ["backbone.sharding=hybrid", "backbone.hybrid_shard_size=2", "backbone.data_parallel_size=4"]
    assert foresee_resume(config(1, *hybrid)).inexact[-2:] == (
        "backbone.sharding was auto, is now hybrid: losses agree only closely",
        "backbone.hybrid_shard_size was None, is now 2: losses agree only closely",
    )
    assert foresee_resume(config(1, "backbone.sharding=gradients")).inexact == longer.inexact[1:], "the same sums"
    find_resume_point(RunDir(root), first, split.changes)
    assert split.inexact[-1] in caplog.messages
    assert flowtrain.dry_run(first.config, resume=True) == DryRunReport(
        first, image_tokens(first), foresee_memory(first), foresee_resume(first)
    )
    with pytest.raises(ConfigError, match="seed was 0, is now 5"):
        flowtrain.dry_run(config(1, "seed=5").config, resume=True)
    checkpointed(first, root, 3, NUM_ROWS)
    with pytest.raises(ConfigError, match="20 positions are trained"):
        flowtrain.dry_run(config(2).config, resume=True)
