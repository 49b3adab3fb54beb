from __future__ import annotations

from pathlib import Path

import pytest

from flowtrain.config.load import load_config
from flowtrain.config.schema import key_patterns, nearest_key
from flowtrain.errors import ConfigError


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        (
            "training.learning_rat=1e-4",
            "training.learning_rat = 0.0001: unknown key; did you mean training.learning_rate?",
        ),
        ("learning_rate=1e-4", "learning_rate = 0.0001: unknown key; did you mean training.learning_rate?"),
        ("training.batch_size=8", "training.batch_size = 8: unknown key; did you mean training.global_batch_size?"),
        ("training.packing=x", "training.packing = 'x': unknown key; did you mean scheduler.packing?"),
        ("encoders.vision.pth=x", "encoders.vision.pth = 'x': unknown key; did you mean encoders.vision.path?"),
        (
            "model.segment_nbytes=1",
            "model.segment_nbytes = 1: unknown key; did you mean encoders.vision.segment_nbytes?",
        ),
        ("data.sources.0.wieght=1", "data.sources.0.wieght = 1: unknown key; did you mean data.sources.0.weight?"),
        ("data.wieght=1", "data.wieght = 1: unknown key; did you mean data.sources.0.weight?"),
        ("qqq=1", "qqq = 1: unknown key; remove it"),
        ("training.global_batch_size=many", "training.global_batch_size = 'many': must be an integer"),
        ("training.global_batch_size=1.5", "training.global_batch_size = 1.5: must be an integer"),
        ("training.global_batch_size=0", "training.global_batch_size = 0: must be at least 1"),
        (
            "pipeline.partition=ballanced",
            "pipeline.partition = 'ballanced': must be one of uniform, parameters, profile, balanced, or a list with "
            "each stage's number of layers; did you mean 'balanced'?",
        ),
        (
            "backbone.activation_checkpointing=adaptiv",
            "backbone.activation_checkpointing = 'adaptiv': must be one of none, full, selective, offload, every_n, "
            "adaptive, or a list with a word for each decoder layer; did you mean 'adaptive'?",
        ),
        (
            "backbone.activation_checkpointing=[none, fulll]",
            "backbone.activation_checkpointing.1 = 'fulll': a list has one of none, full, selective, offload for each "
            "decoder layer; did you mean 'full'?",
        ),
        ("pool.alignment=65", "pool.alignment = 65: must be a multiple of 64"),
        ("pool.alignment=0", "pool.alignment = 0: must be at least 64"),
        ("training.learning_rate=[1]", "training.learning_rate = [1]: must be a number"),
        ("training.learning_rate=.inf", "training.learning_rate = inf: must be a finite number"),
        ("training.betas=[0.9, .nan]", "training.betas.1 = nan: must be a finite number"),
        ("limits.stall_timeout_s=.inf", "limits.stall_timeout_s = inf: must be a finite number"),
        ("training.betas=0.9", "training.betas = 0.9: must be a list"),
        (
            "observability.trackers=tensorboard",
            "observability.trackers = 'tensorboard': must be a list, such as [tensorboard]",
        ),
        (
            f"observability.trackers={'x' * 100}",
            f"observability.trackers = '{'x' * 56}...: must be a list",
        ),
        ("data.shuffle=perhaps", "data.shuffle = 'perhaps': must be 'blocks', 'rows' or 'none'"),
        (
            "backbone.activation_checkpointing=sometimes",
            "backbone.activation_checkpointing = 'sometimes': must be one of none, full, selective, offload, every_n, "
            "adaptive, or a list with a word for each decoder layer",
        ),
        (
            "backbone.activation_checkpointing=[none, every_n]",
            "backbone.activation_checkpointing.1 = 'every_n': a list has one of none, full, selective, offload for "
            "each decoder layer",
        ),
        ("data.order=arival", "data.order = 'arival': must be 'deterministic' or 'arrival'; did you mean 'arrival'?"),
        ("data.sources=[]", "data.sources has 0 entries; it must have at least 1"),
        ("encoders={}", "encoders has 0 entries; it must have at least 1"),
        ("training=5", "training = 5: must be a section (a mapping of keys)"),
        ("name=a/b", "name = 'a/b': must be text that matches ^[A-Za-z0-9][A-Za-z0-9._-]*$"),
    ],
)
def test_one_fault_is_one_line_with_key_value_and_way_out(minimal: Path, override: str, fault: str) -> None:
    assert refusal(minimal, override) == f"run.yaml: override {override!r}: {fault}"


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (
            ["pool.hbm_segment_nbytes=4096", "model.device=cpu"],
            "pool.hbm_segment_nbytes (4096) is memory of accelerators, and model.device ('cpu') uses none; set the "
            "first to 0 or the second to 'auto'",
        ),
        (
            ["pool.hbm_segment_nbytes=2097152", "pool.max_segment_nbytes=1048576", "pool.feeder_segment_nbytes=65536"],
            "pool.hbm_segment_nbytes (2097152) is larger than pool.max_segment_nbytes (1048576); raise the second",
        ),
        (
            ["pool.exchange=point_to_point", "pool.network=auto"],
            "pool.exchange ('point_to_point') works inside one node, and pool.network ('auto') lets a run use several; "
            "set the second to 'none', or the first to 'pool'",
        ),
        (
            ["pool.exchange=point_to_point", "pool.hbm_segment_nbytes=4096", "model.device=auto"],
            "pool.hbm_segment_nbytes (4096) is memory that others map, and pool.exchange ('point_to_point') maps none "
            "for features; set the first to 0",
        ),
        (
            ["pool.max_processes=6", "backbone.data_parallel_size=4", "data.num_feeders=2"],
            "pool.max_processes (6) is less than the 7 processes of the pool (backbone ranks, encoders, feeders); "
            "raise it to at least pool.processes_per_node times the number of nodes",
        ),
        (
            ["data.sources=[{path: train.parquet, name: a}, {path: train.parquet, name: a}]"],
            "data.sources.1.name ('a') is the name of data.sources.0 too, so that ledger and quarantine could not tell "
            "them apart; give it another name",
        ),
        (
            ["pool.hbm_low_watermark=0.95"],
            "pool.hbm_low_watermark (0.95) is above pool.hbm_high_watermark (0.9); lower the first or raise the second",
        ),
        (
            ["data.max_seq_len=8192"],
            "data.max_seq_len (8192) is larger than scheduler.microbatch_tokens (4096): a sample of that length would "
            "fit no microbatch; lower the first or raise the second",
        ),
        (
            ["backbone.data_parallel_size=9"],
            "training.global_batch_size (8) is smaller than backbone.data_parallel_size (9): some ranks would never "
            "get a sample; raise the first or lower the second",
        ),
        (
            ["scheduler.cost=profile"],
            "scheduler.cost ('profile') needs scheduler.cost_profile with data.order ('deterministic'), whose costs "
            "are fixed from the start; give the profile.json that an earlier run of this model wrote into its "
            "directory, or set data.order to 'arrival', which fits costs during the run",
        ),
        (
            ["training.num_epochs=1"],
            "override 'training.num_epochs=1': give exactly one of training.max_steps (now 4) and training.num_epochs "
            "(now 1.0); unset the other with =null",
        ),
        (
            ["backbone.context_parallel_size=2"],
            "backbone.context_parallel_size (2) above 1 is not supported yet; set it to 1, and use "
            "backbone.tensor_parallel_size and backbone.activation_checkpointing for long sequences",
        ),
        (
            ["encoders.vision.tensor_parallel_size=2", "encoders.vision.num_cpus=0"],
            "encoders.vision.tensor_parallel_size (2) above 1 needs encoders.vision.num_cpus (0) above 0: Ray places "
            "its actors on one node by the CPUs they reserve; a fraction is enough",
        ),
        (
            ["encoders.vision.tensor_parallel_size=2", "encoders.vision.num_devices=0.5"],
            "encoders.vision.num_devices (0.5) below 1 would put several of 2 ranks on one accelerator, which NCCL "
            "does not support; set it to 1, or the parallel sizes to 1",
        ),
        (
            ["backbone.data_parallel_size=2", "backbone.num_devices=0.5"],
            "backbone.num_devices (0.5) below 1 would put several of 2 ranks on one accelerator, which NCCL does not "
            "support; set it to 1, or the parallel sizes to 1",
        ),
        (
            ["backbone.pipeline_parallel_size=2", "pipeline.schedule=interleaved_1f1b"],
            "pipeline.schedule ('interleaved_1f1b') needs pipeline.chunks (1) of at least 2; raise "
            "it, or set the schedule to '1f1b'",
        ),
        (
            ["backbone.pipeline_parallel_size=2", "pipeline.chunks=3"],
            "pipeline.chunks (3) above 1 needs pipeline.schedule 'interleaved_1f1b' (now '1f1b'); "
            "set that, or set chunks to 1",
        ),
        (
            ["backbone.hybrid_shard_size=4", "backbone.data_parallel_size=8"],
            "backbone.hybrid_shard_size (4) needs backbone.sharding 'hybrid' (now 'auto'); set that, or unset the size "
            "with =null",
        ),
        (
            ["backbone.path=Qwen/Qwen3-1.7B"],
            "backbone.path and backbone.config are both given; keep one of them",
        ),
    ],
)
def test_an_impossible_combination_is_explained(minimal: Path, overrides: list[str], fault: str) -> None:
    assert refusal(minimal, *overrides) == f"run.yaml: {fault}"


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (
            ["training={max_steps: 2.5}"],
            "override 'training={max_steps: 2.5}': training.max_steps = 2.5: must be an integer",
        ),
        (
            ["data.sources=[{path: gone.parquet}]"],
            "override 'data.sources=[{path: gone.parquet}]': data.sources.0.path = 'gone.parquet': no such file",
        ),
        (
            ["data.sources.1.weight=2"],
            "override 'data.sources.1.weight=2': data.sources.1.path is missing; it is required",
        ),
        (
            ["training.max_steps=soon", "training={max_steps: 0}"],
            "override 'training={max_steps: 0}': training.max_steps = 0: must be at least 1",
        ),
        (["optimizer.name=x"], "override 'optimizer.name=x': optimizer = {'name': 'x'}: unknown key"),
    ],
)
def test_a_fault_of_an_override_never_names_a_line_of_the_file(minimal: Path, overrides: list[str], fault: str) -> None:
    assert refusal(minimal, *overrides).startswith(f"run.yaml: {fault}")


def test_an_override_is_not_blamed_for_what_the_file_says(minimal: Path, minimal_text: str) -> None:
    minimal.write_text(minimal_text + "  num_epochs: 1\n")
    message = refusal(minimal, "training.learning_rate=1e-4")
    assert message.startswith("run.yaml: line 10: give exactly one of training.max_steps (now 4)")


def test_a_fault_in_the_file_has_its_line_and_a_missing_key_its_name(minimal: Path, minimal_text: str) -> None:
    minimal.write_text(minimal_text.replace("max_steps: 4", "max_steps: soon"))
    assert refusal(minimal) == "run.yaml: line 11: training.max_steps = 'soon': must be an integer"
    minimal.write_text(minimal_text.replace("name: small\n", "name: small\nseeed: 1\n"))
    assert refusal(minimal) == "run.yaml: line 2: seeed = 1: unknown key; did you mean seed?"
    minimal.write_text(minimal_text.replace("name: small\n", ""))
    assert refusal(minimal) == "run.yaml: name is missing; it is required"


def test_several_faults_are_listed(minimal: Path) -> None:
    lines = refusal(minimal, "data.ordr=x", "seed=-1").splitlines()
    assert lines[0] == "run.yaml: 2 errors"
    assert sorted(lines[1:]) == [
        "  - override 'data.ordr=x': data.ordr = 'x': unknown key; did you mean data.order?",
        "  - override 'seed=-1': seed = -1: must be at least 0",
    ]


def test_a_long_value_is_cut(minimal: Path) -> None:
    message = refusal(minimal, f"seed={'x' * 200}")
    assert f"seed = '{'x' * 56}...: must be an integer" in message


def test_every_valid_key_is_nearest_to_itself_misspelt() -> None:
    patterns = [pattern for pattern in key_patterns() if len(pattern[-1]) > 6]
    assert len(patterns) > 50
    for pattern in patterns:
        concrete = tuple("vision" if part == "*" else part for part in pattern)
        if pattern[:2] == ("data", "sources") and len(pattern) > 2:
            concrete = ("data", "sources", "0", *concrete[3:])
        assert nearest_key((*concrete[:-1], f"{concrete[-1]}x"), {}) == ".".join(concrete)
