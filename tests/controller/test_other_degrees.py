"""Where a run begins, and what is said of a checkpoint that was written in another way."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from flowtrain.config.load import override_config
from flowtrain.config.run import RunConfig
from flowtrain.controller.prepare import RunSpec, prepare
from flowtrain.controller.resume import ResumePoint, check_goes_on, find_resume_point, other_reduction
from flowtrain.errors import ConfigError
from flowtrain.observability.run_dir import RunDir, open_run_dir
from flowtrain.training.checkpoint_store import CheckpointMeta, commit, temporary_directory
from flowtrain.types.plan import GradientReduction
from flowtrain.types.samples import SamplerState
from tests.controller.audited import write_audit
from tests.e2e.worlds import World, tiny_config

STATE = {"sampler": SamplerState(24).to_dict()}


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    world = World()
    world.add_mixed(8)
    return tiny_config(
        tmp_path, world.write(tmp_path / "train.parquet"), "start", backbone={"pipeline_parallel_size": 2}
    )


def start_of(config: RunConfig, meta: CheckpointMeta | None, check: bool = False) -> tuple[ResumePoint, RunSpec]:
    files: RunDir = open_run_dir(config, resume=False)
    if meta is not None:
        directory = temporary_directory(files.checkpoints, meta.step, "x")
        directory.mkdir()
        (directory / "shard").write_bytes(b"weights")
        commit(directory, meta, keep=1)
        write_audit(files, meta.step)
    run_spec = prepare(config)
    if check:
        check_goes_on(files, run_spec)
    return find_resume_point(files, run_spec, ()), run_spec


def test_without_a_checkpoint_a_run_starts_from_nothing(config: RunConfig, caplog: pytest.LogCaptureFixture) -> None:
    assert start_of(config, None)[0] == ResumePoint()
    assert "has no usable checkpoint" in caplog.text


def meta_of(**changes: object) -> CheckpointMeta:
    version = str(torch.__version__)
    values = {"dp_size": 1, "pp_size": 2, "num_threads": 1, "torch_version": version, **changes}
    return CheckpointMeta(3, STATE, "digest", **values)  # type: ignore[arg-type]


def test_a_run_goes_on_behind_a_checkpoint_without_a_word_where_nothing_changed(
    config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    start, _ = start_of(config, meta_of())
    assert (start.step, start.sampler_state) == (3, SamplerState(24))
    assert start.checkpoint is not None and start.checkpoint.name == "step-00000003"
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dp_size": 2, "pp_size": 1, "tp_size": 2}, "degrees dp=2 pp=1 tp=2, now dp=1 pp=2 tp=1"),
        ({"partition": "chunks=2"}, "the partition backbone"),
        ({"partition": "backbone 0-1 @0"}, "the partition backbone 0-1 @0, now backbone 0-1 @0, backbone 2-3 @1"),
        ({"mode": "monolithic"}, "mode monolithic, now decoupled"),
        ({"num_threads": 3}, "backbone threads 3, now 1"),
        ({"gradient_reduction": "step"}, "backbone.gradient_reduction step, now microbatch"),
        ({"gradient_reduction": None}, "backbone.gradient_reduction step, now microbatch"),
        ({"torch_version": "1.0"}, f"torch 1.0, now {torch.__version__}"),
    ],
)
def test_what_keeps_a_resume_from_being_exact_is_said(
    config: RunConfig, caplog: pytest.LogCaptureFixture, changes: dict[str, object], said: str
) -> None:
    config = override_config(config, ["backbone.gradient_reduction=microbatch", "backbone.config.num_hidden_layers=4"])
    start, _ = start_of(config, meta_of(**{"gradient_reduction": "microbatch", **changes}))
    assert start.step == 3
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    assert said in warning and warning.endswith("losses agree only closely")


def test_what_the_ranks_decide_is_compared_with_the_checkpoint(config: RunConfig) -> None:
    now = GradientReduction("microbatch", "auto: it does not fit")
    start, _ = start_of(config, meta_of(gradient_reduction="step"))
    assert other_reduction(start, now) == (
        "the checkpoint was written with backbone.gradient_reduction step, now microbatch: losses agree only closely"
    )
    assert other_reduction(start, GradientReduction("step", "")) is None
    assert other_reduction(ResumePoint(), now) is None, "a run from the beginning"


def test_modes_with_the_same_encode_batches_go_on_exactly(config: RunConfig, caplog: pytest.LogCaptureFixture) -> None:
    start, _ = start_of(override_config(config, ["mode=disaggregated"]), meta_of())
    assert start.step == 3
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    assert warning.startswith("the run was in mode decoupled, now disaggregated: losses stay the same")


def test_a_trained_encoder_is_not_frozen_by_a_resume(config: RunConfig) -> None:
    with pytest.raises(ConfigError) as caught:
        start_of(config, meta_of(mode="monolithic", trained=("connector", "backbone", "encoders.vision")), check=True)
    assert caught.value.faults[0].key == "encoders.vision.trainable"
    assert "true, which is now false in mode 'decoupled'" in str(caught.value)
    trains = override_config(config, ["mode=monolithic", "encoders.vision.trainable=true", "name=trains"])
    start, _ = start_of(trains, meta_of(mode="monolithic", trained=("encoders.vision",)), check=True)
    assert start.step == 3
