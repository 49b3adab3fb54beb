"""Qwen3-VL through the whole flow: every mode against a plain loop, profile and plan, export and a new start."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForImageTextToText

import flowtrain
from flowtrain.config.load import override_config
from flowtrain.config.run import RunConfig
from flowtrain.controller.export import export_run
from flowtrain.controller.predict import run_workload
from flowtrain.controller.run import run_training
from flowtrain.models.families.registry import family_from_config
from flowtrain.observability.ledger import read_ledger
from flowtrain.observability.run_dir import run_dir
from flowtrain.training.checkpoint import load_backbone_state
from tests.e2e.disturbed import json_lines
from tests.e2e.oracle import PlainLoop, relative_difference
from tests.e2e.worlds import World, tiny_config
from tests.qwen3_vl import PROCESSOR, TEXT, VISION

pytestmark = pytest.mark.e2e

BATCH, NUM_STEPS = 6, 3
MODES: dict[str, tuple[str, ...]] = {
    "decoupled": (),
    "disaggregated": (),
    "colocated": ("backbone.data_parallel_size=2",),
    "monolithic": ("backbone.pipeline_parallel_size=2", "pipeline.encoder_layers=own"),
}
TRAINED, FROZEN = "encoders.vision.trainable=true", "model.freeze=[connector]"
CASES = [
    *((mode, ()) for mode in MODES),
    ("decoupled", (FROZEN,)),
    ("decoupled", ("encoders.vision.tensor_parallel_size=2",)),
    ("monolithic", (TRAINED,)),
    ("monolithic", (TRAINED, FROZEN)),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3_vl")
    world = World(seed=7)
    world.add_mixed(BATCH * NUM_STEPS)
    world.write(directory / "data.parquet")
    return directory


def config_of(directory: Path, name: str, *overrides: str, **sections: dict[str, Any]) -> RunConfig:
    model = {"family": "qwen3_vl", **sections.pop("model", {})}
    config = tiny_config(
        directory,
        directory / "data.parquet",
        name,
        model=model,
        data={"shuffle": False, "max_seq_len": 256},
        scheduler={"microbatch_tokens": 256},
        training={"global_batch_size": BATCH, "max_steps": NUM_STEPS, "optimizer": "sgd"},
        **sections,
    )
    given = ["encoders.vision.data_parallel_size=1", "encoders.vision.max_batch_patches=200"]
    if "path" not in model:
        given += [
            f"encoders.vision.config={json.dumps(VISION)}",
            f"encoders.vision.image_processor={json.dumps(PROCESSOR)}",
            f"backbone.config={json.dumps({**TEXT, 'vocab_size': 4224})}",
        ]
    return override_config(config, [*given, *overrides])


@pytest.mark.parametrize(("mode", "keys"), CASES)
def test_a_mode_trains_as_the_plain_loop_does(
    directory: Path, ray_cluster: None, mode: str, keys: tuple[str, ...]
) -> None:
    name = "-".join([mode, *(key.split("=")[0].split(".")[-1] for key in keys)])
    config = config_of(directory, name, f"mode={mode}", *MODES[mode], *keys)
    assert run_training(config).step == NUM_STEPS
    loop = PlainLoop(config, trains_encoder=TRAINED in keys)
    steps = [loop.step() for _ in range(NUM_STEPS)]
    metrics = json_lines(run_dir(config).metrics)
    assert [line["loss"] for line in metrics] == pytest.approx([step.loss for step in steps], rel=1e-5)
    assert [line["grad_norm"] for line in metrics] == pytest.approx([step.gradient_norm() for step in steps], rel=1e-4)
    predicted = run_workload(config).predictions
    assert [line["plan_digest"] for line in metrics] == [each.digest for each in predicted], "as flowtrain pack shows"


def test_without_images_a_run_has_the_same_tokens(directory: Path, ray_cluster: None) -> None:
    config = config_of(directory, "blind", "mode=llm_only")
    run_training(config)
    blind, seeing = (run_workload(each).predictions for each in (config, config_of(directory, "seeing")))
    assert [line["plan_digest"] for line in json_lines(run_dir(config).metrics)] == [each.digest for each in blind]
    assert [replace(each, digest=None) for each in blind] == [replace(each, digest=None) for each in seeing]


@pytest.mark.parametrize("mode", ["decoupled", "monolithic"])
def test_emulated_devices_run_it_too(directory: Path, ray_cluster: None, mode: str) -> None:
    emulated = {"model": {"device": "emulated"}, "emulated": {"device": "a100"}}
    config = config_of(directory, f"emulated-{mode}", f"mode={mode}", *MODES[mode], **emulated)
    assert run_training(config).step == NUM_STEPS
    ledger = read_ledger(run_dir(config).ledger).to_pylist()
    assert [row["position"] for row in ledger] == list(range(BATCH * NUM_STEPS))
    assert all(row["state"] == "consumed" for row in ledger)


@pytest.mark.parametrize("frozen", [pytest.param((), marks=pytest.mark.nightly), (FROZEN,)])
def test_an_export_starts_a_new_run_with_the_same_weights(
    directory: Path, ray_cluster: None, frozen: tuple[str, ...]
) -> None:
    config = config_of(directory, f"first-{len(frozen)}", *frozen)
    summary = run_training(config)
    exported = export_run(summary.directory).directory
    model = AutoModelForImageTextToText.from_pretrained(exported)
    assert type(model).__name__ == "Qwen3VLForConditionalGeneration"
    encoder = {**config.encoders["vision"].model_dump(), "config": None, "image_processor": {}}
    again = config_of(
        directory,
        f"second-{len(frozen)}",
        "training.max_steps=1",
        "training.learning_rate=0.0",
        *frozen,
        model={"path": str(exported), "tokenizer": None},
        encoders={"vision": encoder},
        backbone={"config": None},
    )
    layouts = [family_from_config(each).image_layout("vision", 100, 30) for each in (config, again)]
    assert layouts[0] == layouts[1] and layouts[0].grid is not None
    second = run_training(again)
    assert summary.checkpoint is not None and second.checkpoint is not None
    before, after = load_backbone_state(summary.checkpoint), load_backbone_state(second.checkpoint)
    assert before.keys() == after.keys()
    assert all(relative_difference(after[name], before[name]) == 0 for name in before)


@pytest.mark.parametrize(
    ("before", "after"),
    [("monolithic", "decoupled"), pytest.param("decoupled", "monolithic", marks=pytest.mark.nightly)],
)
def test_a_frozen_connector_moves_with_a_resume(
    directory: Path, ray_cluster: None, caplog: pytest.LogCaptureFixture, before: str, after: str
) -> None:
    name = f"from-{before}"
    first = config_of(directory, name, f"mode={before}", FROZEN, f"training.max_steps={NUM_STEPS - 1}")
    assert run_training(first).step == NUM_STEPS - 1
    config = config_of(directory, name, f"mode={after}", FROZEN)
    assert run_training(config, resume=True).step == NUM_STEPS
    assert f"written with mode {before}, now {after}: losses agree only closely" in caplog.text
    loop = PlainLoop(config)
    losses = [loop.step().loss for _ in range(NUM_STEPS)]
    assert [line["loss"] for line in json_lines(run_dir(config).metrics)] == pytest.approx(losses, rel=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("keys", [(), ("mode=monolithic", FROZEN)])
def test_it_is_profiled_and_planned(directory: Path, ray_cluster: None, tmp_path: Path, keys: tuple[str, ...]) -> None:
    config = config_of(directory, f"profiled-{len(keys)}", *keys)
    tokens = flowtrain.dry_run(config).image_tokens["vision"]
    fewest, most = tokens.fewest, tokens.most
    assert 1 <= fewest < most
    profile = flowtrain.profile(config, devices=1).profile
    (table,) = profile.encoders["vision"].values()
    assert len(table.num_patches) > 1, "images have sizes of their own"
    file = tmp_path / "profile.json"
    file.write_text(profile.to_json())
    encoders = flowtrain.plan(config, devices=2, profile=file).plan.encoders
    assert {name: each.num_actors for name, each in encoders.items()} == ({} if keys else {"vision": 1})
    planned = flowtrain.plan(config, ["mode=auto"], device="h200", devices=8)
    assert planned.plan.backbone.num_actors >= 1
