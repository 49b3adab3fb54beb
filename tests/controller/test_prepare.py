"""What is known before anything starts: steps, sizes, shapes, and whether the memory suffices."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flowtrain.allocator.candidates import PruneReason
from flowtrain.allocator.plan import requirements
from flowtrain.cli.tables import plan_tables
from flowtrain.config.run import RunConfig
from flowtrain.controller.dry_run import DryRunReport, foresee_run, rejection_warnings
from flowtrain.controller.feeder_memory import feeder_need
from flowtrain.controller.opening import OpenRun, note_start
from flowtrain.controller.planning.devices import AskedDevices
from flowtrain.controller.planning.planned_run import planned_run
from flowtrain.controller.planning.report import make_report
from flowtrain.controller.predict import ImageTokens, SizedUnit, image_tokens, sized_units
from flowtrain.controller.prepare import check_memory, memory_shortage, prepare
from flowtrain.controller.resume import ResumePoint
from flowtrain.errors import ConfigError, DataError
from flowtrain.flow.capacity import check_capacity
from flowtrain.models.families.registry import family_from_config
from flowtrain.observability.run_dir import RunDir
from flowtrain.observability.stream import EventStream
from flowtrain.scheduler.encode_batches import make_encode_batches
from flowtrain.types.evaluation import EvalRounds
from flowtrain.types.plan import Unit, UnitKind
from flowtrain.types.run_events import Noted, RunEvent
from flowtrain.types.samples import PartSize, Rejection, RejectReason, SampleRef, SizedSample
from tests.e2e.worlds import World, tiny_config

NUM_ROWS, NUM_EVAL_ROWS = 20, 5
SAMPLE = (1 << 10) + (1 << 17)
"""Text and images of the largest sample."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("prepare")
    for name, rows in (("train", NUM_ROWS), ("eval", NUM_EVAL_ROWS), ("empty", 0)):
        world = World()
        world.add_mixed(rows)
        world.write(directory / f"{name}.parquet")
    return directory


def config_of(directory: Path, *overrides: str, **sections: object) -> RunConfig:
    return tiny_config(directory, directory / "train.parquet", "prepare", *overrides, **sections)


def test_a_run_by_steps(data: Path) -> None:
    run_spec = prepare(config_of(data))
    assert (run_spec.num_steps, run_spec.total_positions) == (4, None)
    assert run_spec.source_sizes == (NUM_ROWS,) and run_spec.epoch_positions == NUM_ROWS
    assert run_spec.evaluations == () and run_spec.num_eval == 0
    assert run_spec.plan.encoders["vision"].num_actors == 2


@pytest.mark.parametrize(("warmup_steps", "is_warned"), [(4, False), (5, True)])
def test_a_run_within_its_warmup_is_warned_of_at_its_start(data: Path, warmup_steps: int, is_warned: bool) -> None:
    run_spec = prepare(config_of(data, f"training.warmup_steps={warmup_steps}"))
    told: list[RunEvent] = []
    stream = EventStream()
    stream.add(told.append)
    note_start(OpenRun(run_spec, [], None, None, RunDir(data), ResumePoint()), stream)
    warnings = [event.text for event in told if isinstance(event, Noted) and event.level == "warning"]
    assert warnings == ([run_spec.warmup_warning] if is_warned else [])
    if is_warned:
        said = "training.warmup_steps is 5, and the run has 4 steps: the learning rate never reaches training."
        assert warnings[0].startswith(said)


PATTERNS = ["*mlp*", "*embed_tokens*", "connector.linear_1.*"]


@pytest.mark.parametrize("freeze", [[], ["connector"], ["backbone"], PATTERNS, ["connector", "*layers.0.*"]], ids=str)
def test_trainable_parameters_are_those_that_the_optimizer_gets(data: Path, freeze: list[str]) -> None:
    config = config_of(data, f"model.freeze={freeze}")
    backbone = family_from_config(config).backbone_skeleton()
    trained = sum(each.numel() for each in backbone.parameters() if each.requires_grad)
    assert prepare(config).model_spec.num_trainable_parameters(config.frozen_modules) == trained


def test_patterns_that_do_not_fit_the_model_are_refused_before_work_starts(data: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"model.freeze: '\*layer.0.\*' matches no parameter's whole name; the nearest"
    ):
        prepare(config_of(data, 'model.freeze=["*layer.0.*"]'))
    with pytest.raises(ConfigError, match=r"'\*lm_head\*' \(0.1\) has no effect: model.freeze \(\*embed_tokens\*\)"):
        prepare(config_of(data, 'model.freeze=["*embed_tokens*"]', 'training.learning_rates={"*lm_head*": 0.1}'))
    with pytest.raises(ConfigError, match="leaves nothing to train"):
        prepare(config_of(data, 'model.freeze=["*"]'))


def test_tokens_of_an_image_follow_the_family_and_the_data(data: Path) -> None:
    fixed = prepare(config_of(data))
    (unit,) = sized_units(fixed, 1)
    sample = next(each for each in unit.samples if each.num_vision_tokens)
    (images,) = (part.num_items for part in sample.parts if part.name == "vision")
    each = sample.num_vision_tokens // images
    assert image_tokens(fixed) == {"vision": ImageTokens(each, each)}

    varying = prepare(config_of(data, "model.family=variable_llava"))
    (unit,) = sized_units(varying, 1)
    means = [
        round(sample.num_vision_tokens / part.num_items)
        for sample in unit.samples
        for part in sample.parts
        if part.name == "vision"
    ]
    assert image_tokens(varying) == {"vision": ImageTokens(min(means), max(means))}


def test_a_dry_run_warns_of_rejected_samples_and_calls_no_limit_of_the_encoder_seen(data: Path) -> None:
    def foreseen(max_seq_len: int) -> DryRunReport:
        return foresee_run(config_of(data, "model.family=variable_llava", f"data.max_seq_len={max_seq_len}"))

    assert foreseen(128).image_tokens["vision"].are_seen and foreseen(128).warnings == ()
    (few,) = foreseen(48).warnings
    assert few.startswith("1 of the 8 samples that were looked at (12.5%) are rejected, within what data.max_rejected")
    small = foreseen(20)
    assert small.image_tokens == {"vision": ImageTokens(1, 4, are_seen=False)}
    (warning,) = small.warnings
    assert re.match(r"8 of the 8 .* \(100%\) are rejected, more than data\.max_rejected_fraction \(50%\)", warning)
    assert re.search(r"8 oversized_sample \(\d+ tokens .* more than data\.max_seq_len \(20\)\)", warning)
    assert warning.endswith("`flowtrain data check` lists all such rows")
    run, _ = plan_tables(small.run, small.image_tokens)
    cells = [cell for column in run.columns for cell in column.cells]
    assert any("unknown" in str(cell) and "the encoder's limits are 1 to 4" in str(cell) for cell in cells)


@pytest.mark.parametrize(
    ("changes", "policy", "packing"),
    [
        ((), None, "best_fit_balanced, "),
        (("pipeline.policy=balanced",), "balanced", "balanced, "),
        (
            ("pipeline.policy=pipetune", "backbone.accelerator_type=H200"),
            "pipetune searches the number of microbatches, the order of microbatches; times of H200 by data sheets, "
            "whatever the run's devices are",
            "searched, which starts from best_fit_balanced, ",
        ),
        (
            (
                "pipeline.policy=pipetune",
                "backbone.accelerator_type=H200",
                "mode=monolithic",
                "pipeline.pipetune.size=false",
            ),
            "pipetune searches the order of microbatches, what is encoded ahead; times of H200 by data sheets, "
            "whatever the run's devices are",
            "searched, which starts from best_fit_balanced, ",
        ),
    ],
)
def test_a_dry_run_names_the_policy(data: Path, changes: tuple[str, ...], policy: str | None, packing: str) -> None:
    report = foresee_run(config_of(data, *changes))
    run, _ = plan_tables(report.run, report.image_tokens)
    rows = dict(zip(*(map(str, column.cells) for column in run.columns), strict=True))
    assert rows.get("policy") == policy and rows["packing"].startswith(packing)


@pytest.mark.parametrize(("partition", "cut"), [("balanced", " by pipeline.partition balanced"), ("[1, 1]", "")])
def test_a_dry_run_names_how_layers_are_cut(data: Path, partition: str, cut: str) -> None:
    changes = ("backbone.pipeline_parallel_size=2", f"pipeline.partition={partition}")
    report = foresee_run(config_of(data, *changes))
    run, _ = plan_tables(report.run, report.image_tokens)
    rows = dict(zip(*(map(str, column.cells) for column in run.columns), strict=True))
    assert rows["pipeline"].endswith(f", cut into 1 + 1 layers{cut}")


def test_a_warning_of_long_rejections_keeps_its_end() -> None:
    rejections = tuple(
        Rejection(SampleRef(position, 0, position, 0), reason, "x" * 1000)
        for position, reason in enumerate(RejectReason)
    )
    unit = Unit(0, UnitKind.TRAIN, 1, 0, len(rejections))
    (warning,) = rejection_warnings([SizedUnit(unit, (), rejections)], max_rejected_fraction=0.0002)
    assert "max_rejected_fraction (0.02%) allows" in warning and "corrupt_image (xxx" in warning
    assert len(warning) < 2000 and warning.endswith("`flowtrain data check` lists all such rows")


def test_a_run_by_epochs_with_evaluation(data: Path) -> None:
    evaluation = {"path": str(data / "eval.parquet"), "every_steps": 2}
    run_spec = prepare(
        config_of(
            data,
            "training.max_steps=null",
            "training.num_epochs=1.5",
            data={"eval": evaluation, "sources": [{"path": str(data / "train.parquet"), "name": "clips"}]},
        )
    )
    assert (run_spec.num_steps, run_spec.total_positions) == (4, 30)
    assert run_spec.evaluations == (EvalRounds(2, NUM_EVAL_ROWS),) and run_spec.num_eval == NUM_EVAL_ROWS
    assert run_spec.source_names == ("clips",)


def test_sources_without_rows_are_refused(data: Path) -> None:
    with pytest.raises((ConfigError, DataError), match="rows"):
        prepare(tiny_config(data, data / "empty.parquet", "prepare"))


def test_the_models_shapes_are_those_that_are_trained(data: Path) -> None:
    family = family_from_config(config_of(data))
    spec = family.model_spec
    assert (spec.backbone.hidden_size, spec.backbone.num_layers) == (64, 2)
    encoder = family.load_encoder("vision")
    num_computed = len(encoder.tower.encoder.layers)  # those behind the hidden state that is taken are cut off
    assert (spec.encoders["vision"].hidden_size, spec.encoders["vision"].num_layers) == (32, num_computed)
    model = family.load_backbone()
    assert spec.backbone.num_parameters + spec.connector.num_parameters == sum(p.numel() for p in model.parameters())


def test_all_that_speaks_against_the_degrees_is_said_before_anything_starts(data: Path) -> None:
    overrides = ["tensor_parallel_size=5", "pipeline_parallel_size=2"]
    interleaved = ["pipeline.schedule=interleaved_1f1b", "pipeline.chunks=2"]
    config = config_of(data, *(f"backbone.{key}" for key in overrides), *interleaved)
    with pytest.raises(ConfigError) as caught:
        prepare(config)
    assert str(caught.value).splitlines() == [
        "run 'prepare': 4 errors",
        "  - backbone.tensor_parallel_size (5) does not divide the backbone's attention heads (4)",
        "  - backbone.tensor_parallel_size (5) does not divide the backbone's key-value heads (2)",
        "  - backbone.tensor_parallel_size (5) does not divide the backbone's intermediate_size (96)",
        "  - backbone.pipeline_parallel_size (2) times pipeline.chunks (2) is more than the backbone's layers "
        "(2); lower one of them",
    ]


def test_a_shard_size_divides_the_replicas_at_a_start_but_can_be_planned_with_any(data: Path) -> None:
    config = config_of(
        data, "backbone.sharding=hybrid", "backbone.hybrid_shard_size=3", "backbone.data_parallel_size=4"
    )
    with pytest.raises(ConfigError, match=r"hybrid_shard_size \(3\) does not divide backbone.data_parallel_size \(4\)"):
        prepare(config)


def test_heads_that_do_not_divide_a_tower_are_refused(data: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare(config_of(data, "encoders.vision.tensor_parallel_size=3"))
    said = "encoders.vision.tensor_parallel_size (3) does not divide the tower's attention heads (2)"
    assert str(caught.value) == f"run 'prepare': {said}"
    plan = prepare(config_of(data, "encoders.vision.tensor_parallel_size=2")).plan
    assert (plan.encoders["vision"].num_actors, requirements(plan).num_actors) == (4, 7)


def test_degrees_that_fit_are_planned(data: Path) -> None:
    degrees = {"data_parallel_size": 2, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    backbone = prepare(config_of(data, backbone=degrees)).plan.backbone
    assert str(backbone.degrees) == "dp=2 pp=2 tp=2" and backbone.num_actors == 8


def test_a_search_without_times_of_the_devices_is_refused_before_anything_starts(data: Path) -> None:
    search = "pipeline.policy=pipetune"
    with pytest.raises(ConfigError, match=r"pipeline\.policy \('pipetune'\) .*allocator\.profile and") as caught:
        prepare(config_of(data, search))
    assert "backbone.accelerator_type" in str(caught.value) and "'balanced'" in str(caught.value)
    prepare(config_of(data, search, "backbone.accelerator_type=H200"))


@pytest.mark.parametrize(
    ("overrides", "knob"),
    [
        (["encoders.vision.segment_nbytes=65536", "training.global_batch_size=9"], "encoders.vision.segment_nbytes"),
    ],
)
def test_too_little_memory_is_refused_with_its_knob(data: Path, overrides: list[str], knob: str) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare(config_of(data, *overrides))
    message = str(caught.value)
    assert f"raise {knob} to at least" in message and "training.global_batch_size" in message


def refused_below(data: Path, least: int, *overrides: str) -> None:
    """A feeder's segment of ``least`` bytes is accepted, and by default; one less is refused with the number."""
    assert prepare(config_of(data, *overrides)).plan.feeder.segment_nbytes == least
    prepare(config_of(data, *overrides, f"pool.feeder_segment_nbytes={least}"))
    with pytest.raises(ConfigError, match=rf"raise pool\.feeder_segment_nbytes to at least {least}, or lower"):
        prepare(config_of(data, *overrides, f"pool.feeder_segment_nbytes={least - 1}"))


def test_each_feeder_holds_a_step_beside_its_open_blocks(data: Path) -> None:
    index = prepare(config_of(data)).indexes[0]
    rows, alignment = np.diff(index.first_rows), 256
    assert rows.tolist() == [16, 4]
    block = int((index.image_nbytes + rows * alignment).max())
    refused_below(data, 2 * block + 8 * SAMPLE)
    refused_below(data, block + 8 * SAMPLE, "data.num_feeders=2")
    refused_below(data, block + 8 * SAMPLE, "data.shuffle=none")
    refused_below(data, 8 * SAMPLE, "data.shuffle=rows")
    refused_below(data, 15 * SAMPLE, "data.shuffle=rows", "data.order=arrival")
    refused_below(data, 8 * (SAMPLE + 256), "data.shuffle=rows", f"data.max_image_nbytes={(1 << 17) + 1}")
    evaluation = f"data.eval.path={data / 'train.parquet'}"
    refused_below(data, NUM_ROWS * SAMPLE, "data.shuffle=rows", evaluation, "data.eval.max_samples=64")


def test_much_text_in_open_blocks_is_warned_of(data: Path) -> None:
    config = config_of(data)
    index = replace(prepare(config).indexes[0], block_nbytes=np.array([1 << 30, 5]))
    assert feeder_need(config, (index,), 0, 2).other_nbytes == (1 << 30) - int(index.image_nbytes[0])
    warning = feeder_need(config, (index,), 0, 1).warning
    assert warning is not None and "lower data.shuffle_blocks" in warning
    assert feeder_need(config, prepare(config).indexes, 0, 1).warning is None


def test_a_feeder_that_needs_more_than_the_address_space_is_refused(data: Path) -> None:
    small = ("pool.max_segment_nbytes=1048576", "encoders.vision.segment_nbytes=1048576")
    with pytest.raises(ConfigError, match=r"pool\.max_segment_nbytes \(1048576\); lower training\.global_batch_size"):
        prepare(config_of(data, *small))


@pytest.mark.parametrize(
    ("overrides", "knob", "least"),
    [
        # A lease of 18 KiB in either segment, beside half of what seven samples of 16 KiB take.
        (["encoders.vision.segment_nbytes=73728"], "encoders.vision.segment_nbytes", (18 + 7 * 16 // 2) << 10),
    ],
)
def test_arrival_order_may_need_more(data: Path, overrides: list[str], knob: str, least: int) -> None:
    prepare(config_of(data, *overrides))
    with pytest.raises(ConfigError, match=rf"raise {knob} to at least {least},"):
        prepare(config_of(data, *overrides, "data.order=arrival"))
    prepare(config_of(data, *overrides, "data.order=arrival", f"{knob}={least}"))


@pytest.mark.parametrize("max_batch_patches", [4, 12, 128, 500])
@pytest.mark.parametrize("alignment", [64, 4096])
@pytest.mark.parametrize("rows_of_samples", [[128] * 8, [1] * 8, [1, 128] * 4, [100, 30] * 4, [60, 70, 3, 128] * 2])
def test_what_passes_the_check_holds_every_step(
    data: Path, max_batch_patches: int, alignment: int, rows_of_samples: list[int]
) -> None:
    """Where the check passes, the real batches of a step are no more, and none is larger, than it counted with."""
    config = config_of(data, f"encoders.vision.max_batch_patches={max_batch_patches}", f"pool.alignment={alignment}")
    family = family_from_config(config)
    largest, most = [], []

    def note(segments: list[int], largest_part_nbytes: int, parts_per_step: int, knob: str) -> None:
        if knob.startswith("encoders"):
            largest.append(largest_part_nbytes)
            most.append(parts_per_step)
        check_capacity([1 << 40], largest_part_nbytes, parts_per_step, knob)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flowtrain.controller.prepare.check_capacity", note)
        check_memory(config, family, num_eval=0)
    row_nbytes = family.row_nbytes("vision")
    samples = [
        SizedSample(SampleRef(k, 0, k, 0), rows, rows, 1, (PartSize("vision", 1, rows, rows, rows * row_nbytes),))
        for k, rows in enumerate(rows_of_samples)
    ]
    batches = make_encode_batches(0, samples, {"vision": max_batch_patches}, alignment)
    assert max(batch.nbytes for batch in batches) <= largest[0]
    assert len(batches) <= most[0]


def test_what_the_pool_cannot_hold_without_an_encoder_is_said(data: Path) -> None:
    run_spec = prepare(config_of(data))
    assert memory_shortage(run_spec, ["vision", "vision"]) is None
    shortage = memory_shortage(run_spec, [])
    assert shortage is not None and "no segment at all hold 0" in shortage


def test_a_type_that_tensor_parallel_ranks_cannot_share_is_refused_before_anything_starts(data: Path) -> None:
    olmo = {"config": {**config_of(data).backbone.config, "model_type": "olmo2"}}
    olmo["config"].pop("head_dim", None)
    prepare(config_of(data, backbone=olmo))
    assert planned_run(config_of(data)).whole == frozenset()
    planned = planned_run(config_of(data, backbone=olmo))
    assert planned.whole == {"backbone"}
    choice = make_report(planned, AskedDevices(devices=8)).allocation
    assert choice.modules[-1].degrees.tp == 1
    assert choice.pruned["backbone"][PruneReason.WHOLE] > 0
    with pytest.raises(ConfigError) as caught:
        prepare(config_of(data, "backbone.tensor_parallel_size=2", backbone=olmo))
    assert str(caught.value) == (
        "backbone.tensor_parallel_size (2): transformers' tensor parallel plan of olmo2 asks for "
        "colwise_gather_output, rowwise_split_input, which FlowTrain does not have; set it to 1, or use a model like "
        "Qwen3 or Llama"
    )
