from __future__ import annotations

from pathlib import Path

import pytest

from flowtrain.config.load import load_config
from flowtrain.config.resume import ABSENT, Change, changes, check_resumable, config_digest
from flowtrain.errors import ConfigError


@pytest.mark.parametrize(
    "override",
    [
        "training.max_steps=9",
        "observability.progress=off",
        "checkpoint.every_steps=7",
        "limits.stall_timeout_s=5",
        "pool.feeder_segment_nbytes=131072",
        "data.num_feeders=3",
        "data.read_ahead_blocks=5",
        "scheduler.lookahead_steps=5",
        "scheduler.cost_profile=train.parquet",  # a file that is there; it is not read for this
        "encoders.vision.data_parallel_size=3",
        "encoders.vision.segment_nbytes=131072",
        "encoders.vision.num_cpus=0.25",
        "backbone.prefetch_microbatches=1",
        "backbone.data_parallel_size=2",
        "backbone.tensor_parallel_size=2",
        "encoders.vision.tensor_parallel_size=2",
        "backbone.pipeline_parallel_size=4",
        "data.max_rejected_fraction=0.5",
        "data.num_feeders=3",
    ],
)
def test_what_leaves_the_losses_alone_may_change(minimal: Path, override: str) -> None:
    old, new = load_config(minimal), load_config(minimal, [override])
    assert old != new
    check_resumable(old, new)
    assert config_digest(old) == config_digest(new)


def test_the_pipelines_schedule_may_change(minimal: Path) -> None:
    pipeline = ["backbone.pipeline_parallel_size=2"]
    interleaved = ["pipeline.schedule=interleaved_1f1b", "pipeline.chunks=2"]
    old, new = load_config(minimal, pipeline), load_config(minimal, pipeline + interleaved)
    check_resumable(old, new)
    assert config_digest(old) == config_digest(new)


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("seed=7", "seed was 0, is now 7"),
        ("data.oversized=truncate_text", "data.oversized was 'reject', is now 'truncate_text'"),
        ("scheduler.cost=tokens", "scheduler.cost was 'eq3', is now 'tokens'"),
        ("data.order=arrival", "data.order was 'deterministic', is now 'arrival'"),
        ("data.shuffle=rows", "data.shuffle was 'blocks', is now 'rows'"),
        ("data.shuffle_blocks=16", "data.shuffle_blocks was 64, is now 16"),
        ("data.max_image_nbytes=4096", "data.max_image_nbytes was 8388608, is now 4096"),
        ("data.max_text_nbytes=4096", "data.max_text_nbytes was None, is now 4096"),
        ("data.sources.0.weight=2", "data.sources.0.weight was 1.0, is now 2.0"),
        ("training.global_batch_size=4", "training.global_batch_size was 8, is now 4"),
        ("training.optimizer=sgd", "training.optimizer was 'adamw', is now 'sgd'"),
        ("scheduler.microbatch_tokens=8192", "scheduler.microbatch_tokens was 4096, is now 8192"),
        ("model.dtype=bfloat16", "model.dtype was 'float32', is now 'bfloat16'"),
        ("backbone.config.hidden_size=64", "backbone.config.hidden_size was '(not given)', is now 64"),
        ("backbone.num_threads=2", "backbone.num_threads was 1, is now 2"),
        ("encoders.vision.max_batch_patches=8", "encoders.vision.max_batch_patches was 4096, is now 8"),
    ],
)
def test_what_decides_the_losses_may_not(minimal: Path, override: str, fault: str) -> None:
    old, new = load_config(minimal), load_config(minimal, [override])
    with pytest.raises(ConfigError) as caught:
        check_resumable(old, new)
    assert str(caught.value) == (
        "run 'small' cannot be resumed with this configuration; "
        f"set these keys back, or start a run under another name:\n  - {fault}"
    )
    assert config_digest(old) != config_digest(new)


@pytest.mark.parametrize(
    ("old", "new"),
    [("decoupled", "colocated"), ("colocated", "monolithic"), ("monolithic", "disaggregated")],
)
def test_the_mode_may_change(minimal: Path, old: str, new: str) -> None:
    before, after = load_config(minimal, [f"mode={old}"]), load_config(minimal, [f"mode={new}"])
    check_resumable(before, after)
    assert config_digest(before) == config_digest(after)


@pytest.mark.parametrize(("old", "new"), [("llm_only", "decoupled"), ("monolithic", "llm_only")])
def test_a_run_without_images_stays_one(minimal: Path, old: str, new: str) -> None:
    with pytest.raises(ConfigError, match=f"mode was '{old}', is now '{new}'; 'llm_only' trains without images"):
        check_resumable(load_config(minimal, [f"mode={old}"]), load_config(minimal, [f"mode={new}"]))


def test_an_encoder_stays_frozen_or_trained(minimal: Path) -> None:
    frozen = load_config(minimal, ["mode=monolithic"])
    trained = load_config(minimal, ["mode=monolithic", "encoders.vision.trainable=true"])
    with pytest.raises(ConfigError, match=r"encoders.vision.trainable was False, is now True; .* no optimizer state"):
        check_resumable(frozen, trained)
    with pytest.raises(ConfigError, match=r"encoders.vision.trainable was True, is now False; .* its trained weights"):
        check_resumable(trained, load_config(minimal))


def test_a_run_may_only_grow(minimal: Path) -> None:
    with pytest.raises(ConfigError, match=r"training.max_steps was 4, is now 3; it may only grow"):
        check_resumable(load_config(minimal), load_config(minimal, ["training.max_steps=3"]))
    epochs = load_config(minimal, ["training.max_steps=null", "training.num_epochs=2"])
    with pytest.raises(ConfigError, match=r"training.num_epochs was None, is now 2.0"):
        check_resumable(load_config(minimal), epochs)


def test_another_source_is_named_once_per_key(minimal: Path) -> None:
    Path("more.parquet").touch()
    new = load_config(minimal, ["data.sources.1.path=more.parquet", "seed=1"])
    with pytest.raises(ConfigError) as caught:
        check_resumable(load_config(minimal), new)
    message = str(caught.value)
    assert "  - seed was 0, is now 1" in message
    assert f"  - data.sources.1.path was '(not given)', is now {str(Path('more.parquet').resolve())!r}" in message


def test_every_difference_is_listed_with_both_values(minimal: Path) -> None:
    old = load_config(minimal)
    new = load_config(minimal, ["seed=7", "backbone.config.hidden_size=64", "checkpoint.every_steps=7"])
    assert changes(old, old) == ()
    assert set(changes(old, new)) == {
        Change("seed", 0, 7),
        Change("backbone.config.hidden_size", ABSENT, 64),
        Change("checkpoint.every_steps", old.checkpoint.every_steps, 7),
    }
