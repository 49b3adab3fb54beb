"""InternVL through the whole flow: every mode against a plain loop, profile and plan, export and a new start."""

from __future__ import annotations

import json
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
from tests.internvl import PROCESSOR, VISION

pytestmark = pytest.mark.e2e

BATCH, NUM_STEPS = 6, 3
MODES: dict[str, tuple[str, ...]] = {
    "decoupled": (),
    "disaggregated": (),
    "colocated": ("backbone.data_parallel_size=2",),
    "monolithic": ("backbone.pipeline_parallel_size=2", "pipeline.encoder_layers=own"),
}
TRAINED = "encoders.vision.trainable=true"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("internvl")
    world = World(seed=7)
    world.add_mixed(BATCH * NUM_STEPS)
    world.write(directory / "data.parquet")
    return directory


def config_of(directory: Path, name: str, *overrides: str, **sections: dict[str, Any]) -> RunConfig:
    model = {"family": "internvl", **sections.pop("model", {})}
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
            "encoders.vision.feature_layer=-1",
            "backbone.config.vocab_size=4224",
        ]
    return override_config(config, [*given, *overrides])


@pytest.mark.parametrize(("mode", "trained"), [*((mode, False) for mode in MODES), ("monolithic", True)])
def test_a_mode_trains_as_the_plain_loop_does(directory: Path, ray_cluster: None, mode: str, trained: bool) -> None:
    config = config_of(directory, f"{mode}-{trained}", f"mode={mode}", *MODES[mode], *([TRAINED] if trained else []))
    assert run_training(config).step == NUM_STEPS
    loop = PlainLoop(config, trains_encoder=trained, processing={"crop_to_patches": True})
    steps = [loop.step() for _ in range(NUM_STEPS)]
    metrics = json_lines(run_dir(config).metrics)
    assert [line["loss"] for line in metrics] == pytest.approx([step.loss for step in steps], rel=1e-5)
    assert [line["grad_norm"] for line in metrics] == pytest.approx([step.gradient_norm() for step in steps], rel=1e-4)
    predicted = run_workload(config).predictions
    assert [line["plan_digest"] for line in metrics] == [each.digest for each in predicted], "as flowtrain pack shows"


def test_without_images_a_run_has_the_same_tokens(directory: Path, ray_cluster: None) -> None:
    blind, seeing = config_of(directory, "blind", "mode=llm_only"), config_of(directory, "seeing")
    for config in (blind, seeing):
        run_training(config)
    ours, theirs = (json_lines(run_dir(each).metrics) for each in (blind, seeing))
    for key in ("num_samples", "num_tokens", "num_target_tokens"):
        assert [line[key] for line in ours] == [line[key] for line in theirs], key
    assert [line["plan_digest"] for line in ours] == [each.digest for each in run_workload(blind).predictions]


@pytest.mark.parametrize("mode", ["decoupled", "monolithic"])
def test_emulated_devices_run_it_too(directory: Path, ray_cluster: None, mode: str) -> None:
    emulated = {"model": {"device": "emulated"}, "emulated": {"device": "a100"}}
    config = config_of(directory, f"emulated-{mode}", f"mode={mode}", *MODES[mode], **emulated)
    assert run_training(config).step == NUM_STEPS
    ledger = read_ledger(run_dir(config).ledger).to_pylist()
    assert [row["position"] for row in ledger] == list(range(BATCH * NUM_STEPS))
    assert all(row["state"] == "consumed" for row in ledger)


def test_an_export_starts_a_new_run_with_the_same_weights(directory: Path, ray_cluster: None) -> None:
    config = config_of(directory, "first")
    summary = run_training(config)
    exported = export_run(summary.directory).directory
    model = AutoModelForImageTextToText.from_pretrained(exported)
    assert type(model).__name__ == "InternVLForConditionalGeneration"
    encoder = {**config.encoders["vision"].model_dump(), "config": None, "image_processor": {}}
    again = config_of(
        directory,
        "second",
        "training.max_steps=1",
        "training.learning_rate=0.0",
        model={"path": str(exported), "tokenizer": None},
        encoders={"vision": encoder},
        backbone={"config": None},
    )
    layouts = [family_from_config(each).image_layout("vision", 100, 30) for each in (config, again)]
    assert layouts[0] == layouts[1] and layouts[0].num_tiles > 1
    second = run_training(again)
    assert summary.checkpoint is not None and second.checkpoint is not None
    before, after = load_backbone_state(summary.checkpoint), load_backbone_state(second.checkpoint)
    assert before.keys() == after.keys()
    assert all(relative_difference(after[name], before[name]) == 0 for name in before)


@pytest.mark.nightly
def test_it_is_profiled_and_planned(directory: Path, ray_cluster: None, tmp_path: Path) -> None:
    config = config_of(directory, "profiled")
    tokens = flowtrain.dry_run(config).image_tokens["vision"]
    fewest, most = tokens.fewest, tokens.most
    assert 4 <= fewest < most, "tokens of an image, not of a tile"
    profile = flowtrain.profile(config, devices=1).profile
    (table,) = profile.encoders["vision"].values()
    assert table.num_patches == (16,), "a tile has always so many"
    file = tmp_path / "profile.json"
    file.write_text(profile.to_json())
    assert flowtrain.plan(config, devices=2, profile=file).plan.encoders["vision"].num_actors == 1
    planned = flowtrain.plan(config, ["mode=auto"], device="h200", devices=8)
    assert planned.plan.backbone.num_actors >= 1
