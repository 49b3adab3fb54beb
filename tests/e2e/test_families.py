"""Whole runs with other families and other starting points, and what comes out of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoProcessor, LlavaForConditionalGeneration

from flowtrain.config.parameter_names import module_of
from flowtrain.controller.export import export_run
from flowtrain.controller.run import run_training
from flowtrain.models.families.registry import family_from_config
from flowtrain.models.initial_weights import local_index
from flowtrain.training.checkpoint import load_backbone_state, stored_frozen
from flowtrain.training.frozen import digests_of
from tests.e2e.oracle import relative_difference
from tests.e2e.worlds import World, tiny_config

pytestmark = pytest.mark.e2e


def mixed_data(tmp_path: Path, count: int = 16) -> Path:
    world = World()
    world.add_mixed(count)
    return world.write(tmp_path / "data.parquet")


def test_variable_resolution_runs_through_the_whole_flow(tmp_path: Path, ray_cluster: None) -> None:
    """Patches follow each image's size, so parts, batches and microbatches differ in every way."""
    config = tiny_config(
        tmp_path,
        mixed_data(tmp_path),
        "variable",
        "encoders.vision.image_processor={size: {height: 56, width: 56}}",
        model={"family": "variable_llava"},
        training={"max_steps": 3},
    )
    family = family_from_config(config)
    assert (
        len({family.image_layout("vision", *size).num_tokens for size in ((20, 80), (56, 56), (80, 20), (30, 30))}) > 1
    )
    summary = run_training(config)
    losses = [json.loads(line)["loss"] for line in (summary.directory / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 3 and losses[-1] < losses[0]


def test_an_export_loads_in_transformers_and_starts_a_new_run(tmp_path: Path, ray_cluster: None) -> None:
    data = mixed_data(tmp_path)
    config = tiny_config(tmp_path, data, "first", training={"max_steps": 2})
    summary = run_training(config)
    exported = export_run(summary.directory).directory
    assert exported == summary.directory / "export"

    model = LlavaForConditionalGeneration.from_pretrained(exported)
    processor = AutoProcessor.from_pretrained(exported)
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it"}]}]
    prompt = processor.apply_chat_template(chat, add_generation_prompt=True)
    inputs = processor(text=prompt, images=[torch.zeros(3, 40, 20, dtype=torch.uint8)], return_tensors="pt")
    assert model.generate(**inputs, max_new_tokens=3, do_sample=False).shape[0] == 1

    again = tiny_config(
        tmp_path,
        data,
        "second",
        model={"path": str(exported), "tokenizer": None},
        training={"max_steps": 1, "learning_rate": 0.0},
        encoders={"vision": {**config.encoders["vision"].model_dump(), "config": None}},
        backbone={"config": None},
    )
    second = run_training(again)
    assert summary.checkpoint is not None and second.checkpoint is not None
    before, after = load_backbone_state(summary.checkpoint), load_backbone_state(second.checkpoint)
    assert before.keys() == after.keys()
    assert all(relative_difference(after[name], before[name]) == 0 for name in before)


@pytest.mark.parametrize("freeze", [("connector",), pytest.param(("backbone",), marks=pytest.mark.nightly)])
def test_frozen_modules_stay_as_they_are(tmp_path: Path, ray_cluster: None, freeze: tuple[str, ...]) -> None:
    config = tiny_config(
        tmp_path, mixed_data(tmp_path), f"freeze-{freeze[0]}", model={"freeze": freeze}, training={"max_steps": 1}
    )
    summary = run_training(config)
    assert summary.checkpoint is not None
    trained = load_backbone_state(summary.checkpoint)
    initial = family_from_config(config).load_backbone()
    changed = {
        module_of(name) for name, tensor in trained.items() if not torch.equal(initial.state_dict()[name], tensor)
    }
    frozen = [
        (name, parameter.detach(), local_index(parameter))
        for name, parameter in initial.named_parameters()
        if module_of(name) in freeze
    ]
    found = {module: entry["digest"] for module, entry in stored_frozen(summary.checkpoint).items()}
    assert found == {module: f"{digest:016x}" for module, digest in digests_of(frozen).items()}
    assert {module_of(name) for name in trained} == changed, "what is frozen is not stored"
    assert changed == {"connector", "backbone"} - set(freeze)


def test_name_patterns_freeze_and_give_rates_through_a_whole_run(tmp_path: Path, ray_cluster: None) -> None:
    config = tiny_config(
        tmp_path,
        mixed_data(tmp_path),
        "patterns",
        model={"freeze": ("*layers.0.*", "connector.linear_1.*")},
        training={"max_steps": 1, "learning_rates": {"*norm*": 0.0, "*.layers.1.mlp.*": 1e-2}},
    )
    run_training(config)
    longer = config.model_copy(update={"training": config.training.model_copy(update={"max_steps": 2})})
    summary = run_training(longer, resume=True)
    assert summary.step == 2 and summary.checkpoint is not None
    first, trained = family_from_config(config).load_backbone().state_dict(), load_backbone_state(summary.checkpoint)
    is_frozen = {name: ".layers.0." in name or ".linear_1." in name for name in first}
    assert trained.keys() == {name for name in first if not is_frozen[name]}
    stays = {name for name, tensor in trained.items() if torch.equal(first[name], tensor)}
    assert stays == {name for name in trained if "norm" in name}
    exported = export_run(summary.directory).directory
    model = LlavaForConditionalGeneration.from_pretrained(exported)
    weights = dict(model.model.language_model.named_parameters())
    for name, tensor in first.items():
        if name.startswith("language_model.model."):
            expected = tensor if is_frozen[name] else trained[name]
            assert torch.equal(weights[name.removeprefix("language_model.model.")], expected), name
