"""A new user with a checkpoint: `init`, dry run, training, `export`, and README's recipe in stock transformers."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from typer.testing import CliRunner

from flowtrain.cli.app import app
from flowtrain.config.load import load_config
from tests.checkpoints import internvl, qwen3_vl, with_weights
from tests.e2e.disturbed import json_lines
from tests.e2e.worlds import ROOT, World
from tests.processors import leave_out_videos

pytestmark = pytest.mark.e2e

MAKERS: dict[str, Callable[[Path], Path]] = {"qwen3_vl": qwen3_vl, "internvl": internvl}
CLASSES = {"qwen3_vl": "Qwen3VLForConditionalGeneration", "internvl": "InternVLForConditionalGeneration"}
NUM_ROWS = 6


def flowtrain(*arguments: str) -> str:
    """Run a command; returns what it prints."""
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("family", MAKERS)
def test_a_checkpoint_is_trained_and_answers_in_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ray_cluster: None
) -> None:
    monkeypatch.chdir(tmp_path)
    leave_out_videos(monkeypatch)
    with_weights(MAKERS[family](tmp_path / "Tiny-Model"))
    world = World(seed=5)
    for number in range(NUM_ROWS):
        world.add(number % 3, answer=world.words(1, 9))
    world.write(tmp_path / "train.parquet")

    printed = flowtrain("init", "Tiny-Model", "--data", "train.parquet")
    assert f"family {family}" in printed and load_config("tiny-model.yaml").model.path == str(tmp_path / "Tiny-Model")
    # In float32, so that losses can be compared, and with a rate of zero, so that the export is what was trained on.
    changes = ["mode=decoupled", "model.device=cpu", "model.dtype=float32", f"training.global_batch_size={NUM_ROWS}"]
    changes += ["training.warmup_steps=0", "training.learning_rate=0.0", "observability.dashboard=false"]
    tried = flowtrain("train", "tiny-model.yaml", *changes, "--dry-run")
    assert f"family {family}" in tried and f"1 of {NUM_ROWS} samples" in tried
    flowtrain("train", "tiny-model.yaml", *changes)
    flowtrain("export", "tiny-model")

    export = tmp_path / "runs" / "tiny-model" / "export"
    (line,) = json_lines(tmp_path / "runs" / "tiny-model" / "metrics.jsonl")
    assert line["loss"] == pytest.approx(stock_loss(export, tmp_path / "train.parquet", CLASSES[family]), rel=1e-5)
    Image.new("RGB", (50, 40), "red").save(tmp_path / "any-picture.png")
    capsys.readouterr()
    exec(compile(recipe(export), "README.md", "exec"), {})
    assert capsys.readouterr().out.endswith("\n")


def stock_loss(export: Path, data: Path, hf_class: str) -> float:
    """The mean loss of all answers' tokens, by what stock transformers loads."""
    model = AutoModelForImageTextToText.from_pretrained(export).eval()
    processor = AutoProcessor.from_pretrained(export)
    assert type(model).__name__ == hf_class and model.dtype == torch.float32
    total, count = 0.0, 0
    for row in pq.read_table(data).to_pylist():
        images = [Image.open(io.BytesIO(image["bytes"])).convert("RGB") for image in row["images"]]
        (turn,) = row["texts"]
        asked = f"\n{turn['user']}" if images else turn["user"]
        question = {"role": "user", "content": [*[{"type": "image"}] * len(images), {"type": "text", "text": asked}]}
        answer = {"role": "assistant", "content": [{"type": "text", "text": turn["assistant"]}]}
        prompt = processor.apply_chat_template([question], add_generation_prompt=True)
        said = processor.apply_chat_template([question, answer]).removeprefix(prompt).rstrip("\n")
        inputs: dict[str, Any] = dict(processor(images=images or None, text=prompt + said, return_tensors="pt"))
        num_said = len(processor.tokenizer(said, add_special_tokens=False)["input_ids"])
        labels = torch.full_like(inputs["input_ids"], -100)
        labels[0, -num_said:] = inputs["input_ids"][0, -num_said:]
        with torch.no_grad():
            total, count = total + float(model(**inputs, labels=labels).loss) * num_said, count + num_said
    return total / count


def recipe(export: Path) -> str:
    """README's code that loads an export and asks it, for this one."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    (code,) = [block for block in blocks if "AutoModelForImageTextToText" in block]
    assert code.count('"runs/first/export"') == 2
    return str(code).replace("runs/first/export", str(export))
