"""Code that a checkpoint brings is never run, whatever a user would answer if asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowtrain.config.model import ModelConfig
from flowtrain.errors import ConfigError
from flowtrain.models.image_processing import load_image_processor
from flowtrain.models.tokenizer import load_tokenizer
from flowtrain.models.weights import read_config


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its code leaves a file behind. Transformers asks on the terminal unless it is told not to run code."""
    monkeypatch.setattr("builtins.input", lambda *prompt: "y")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    ran = tmp_path / "ran"
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Own:\n    pass\n")
    auto = {"AutoConfig": "own.Own", "AutoTokenizer": ["own.Own", "own.Own"], "AutoImageProcessor": "own.Own"}
    for name, values in {
        "config.json": {"model_type": "own"},
        "tokenizer_config.json": {"tokenizer_class": "Own"},
        "preprocessor_config.json": {"image_processor_type": "Own"},
    }.items():
        (folder / name).write_text(json.dumps({**values, "auto_map": auto}))
    return folder


def test_configurations(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"backbone\.path: no HF model can be read"):
        read_config(str(checkpoint), None, "backbone")
    assert not (tmp_path / "ran").exists()


def test_tokenizers(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer can be read"):
        load_tokenizer(str(checkpoint), ModelConfig(), "<image>")
    assert not (tmp_path / "ran").exists()


def test_image_processors(checkpoint: Path, tmp_path: Path) -> None:
    tower = read_config(None, {"model_type": "siglip_vision_model"}, "encoders.vision")
    with pytest.raises(ConfigError, match="no image processor can be read"):
        load_image_processor(str(checkpoint), tower, {}, "encoders.vision")
    assert not (tmp_path / "ran").exists()
