"""Several held-out sets in a whole run: their losses, the model's answers, the best checkpoint; and its export."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from flowtrain.config.load import override_config
from flowtrain.config.run import RunConfig
from flowtrain.controller.export import export_run
from flowtrain.controller.run import run_training
from flowtrain.observability.run_dir import RunDir, run_dir
from flowtrain.training.checkpoint_store import read_meta
from tests.e2e.disturbed import json_lines
from tests.e2e.worlds import World, tiny_config

pytestmark = pytest.mark.e2e

BATCH, NUM_STEPS, EVERY, NUM_ANSWERED, MAX_NEW_TOKENS = 6, 4, 2, 3, 12


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, World]:
    """Training data, and held-out sets of samples with pictures and of text alone."""
    directory = tmp_path_factory.mktemp("generated")
    training, seen, text = World(seed=3), World(seed=4), World(seed=5)
    training.add_mixed(BATCH * NUM_STEPS)
    for count in (1, 2, 0, 1, 1):
        seen.add(count)
    text.add(0)
    for name, world in (("train", training), ("seen", seen), ("text", text)):
        world.write(directory / f"{name}.parquet")
    return directory, seen


def config_of(directory: Path, name: str, *overrides: str) -> RunConfig:
    held_out = {
        name: {"path": str(directory / f"{name}.parquet"), "every_steps": EVERY, "num_generated": NUM_ANSWERED}
        | {"max_new_tokens": MAX_NEW_TOKENS}
        for name in ("seen", "text")
    }
    config = tiny_config(
        directory,
        directory / "train.parquet",
        name,
        data={"shuffle": False, "eval": held_out},
        training={"global_batch_size": BATCH, "max_steps": NUM_STEPS, "learning_rate": 1e-2},
        checkpoint={"every_steps": EVERY, "keep": 1, "keep_best": "eval_loss/seen"},
    )
    return override_config(config, ["encoders.vision.data_parallel_size=1", *overrides])


@pytest.fixture(scope="module")
def trained(worlds: tuple[Path, World], ray_cluster: None) -> RunConfig:
    config = config_of(worlds[0], "two-sets", "backbone.data_parallel_size=2")
    assert run_training(config).step == NUM_STEPS
    return config


def answers(run: RunDir, step: int, name: str) -> list[dict[str, Any]]:
    return json_lines(run.generated / str(step) / f"{name}.jsonl")


def test_each_set_has_its_loss_and_its_event(trained: RunConfig) -> None:
    run = run_dir(trained)
    metrics = json_lines(run.metrics)
    assert [sorted(line["eval_losses"]) for line in metrics] == [[], ["seen", "text"]] * (NUM_STEPS // EVERY)
    for line in metrics:
        losses = list(line["eval_losses"].values())
        assert line["eval_loss"] is None if not losses else min(losses) <= line["eval_loss"] <= max(losses)
    events = [line for line in json_lines(run.events) if line["event"] == "evaluation"]
    assert [(event["step"], event["name"]) for event in events] == [
        (step, name) for step in range(EVERY, NUM_STEPS + 1, EVERY) for name in ("seen", "text")
    ]
    for event in events:
        assert event["loss"] == metrics[event["step"] - 1]["eval_losses"][event["name"]]
        expected = answers(run, event["step"], event["name"])
        assert event["generated"] == [
            {k: v for k, v in each.items() if k not in ("schema", "step")} for each in expected
        ]
        assert all((run.root / name).is_file() for each in event["generated"] for name in each["images"])


def test_the_best_checkpoint_is_kept_and_exported(trained: RunConfig, tmp_path: Path) -> None:
    run = run_dir(trained)
    losses = {line["step"]: line["eval_losses"]["seen"] for line in json_lines(run.metrics) if line["eval_losses"]}
    best = min(losses, key=losses.__getitem__)
    kept = {read_meta(path).step: read_meta(path) for path in run.checkpoints.glob("step-*")}
    assert set(kept) == {best, NUM_STEPS}
    assert all(meta.metrics["eval_loss/seen"] == losses[step] for step, meta in kept.items())
    assert export_run(run.root, tmp_path / "best", best=True).step == best
    told = {line["step"]: line["best_of"] for line in json_lines(run.events) if line["event"] == "checkpoint"}
    assert told[best] == "eval_loss/seen"


@pytest.mark.parametrize("mode", ["decoupled", "monolithic"])
def test_answers_are_those_of_the_exported_model(
    worlds: tuple[Path, World], trained: RunConfig, tmp_path: Path, mode: str
) -> None:
    directory, seen = worlds
    config = trained
    if mode == "monolithic":
        config = config_of(directory, "two-sets-monolithic", "mode=monolithic", "backbone.pipeline_parallel_size=2")
        run_training(config)
    run = run_dir(config)
    exported = export_run(run.root, tmp_path / "export").directory
    model = AutoModelForImageTextToText.from_pretrained(exported).eval()
    processor = AutoProcessor.from_pretrained(exported)
    end, found = processor.tokenizer.eos_token_id, answers(run, NUM_STEPS, "seen")
    assert [each["row"] for each in found] == list(range(NUM_ANSWERED))
    for each, row in zip(found, seen.rows, strict=False):
        images = [Image.open(io.BytesIO(image["bytes"])).convert("RGB") for image in row["images"]]
        question = row["texts"][0]["user"]
        assert each["prompt"] == ("<image>" * len(images) + "\n" if images else "") + question
        assert each["reference"] == row["texts"][0]["assistant"] and len(each["images"]) == len(images)
        content = [
            *({"type": "image"} for _ in images),
            {"type": "text", "text": f"\n{question}" if images else question},
        ]
        prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        inputs = processor(images=images or None, text=prompt, return_tensors="pt")
        with torch.no_grad():
            output = model.generate(
                **inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False, eos_token_id=end, pad_token_id=end
            )
        text = processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()
        assert each["text"] == text, json.dumps(each)
