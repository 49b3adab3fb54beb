"""A small valid configuration to spoil."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

MINIMAL = """\
name: small
encoders:
  vision:
    config: {model_type: siglip_vision_model, hidden_size: 32}
backbone:
  config: {model_type: qwen3, rms_norm_eps: 1e-6}
data:
  sources:
    - path: train.parquet
training:
  max_steps: 4
"""

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a configuration in an empty current directory that has the data file; returns its relative path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.parquet").touch()

    def write_file(text: str) -> Path:
        Path("run.yaml").write_text(text)
        return Path("run.yaml")

    return write_file


@pytest.fixture
def minimal_text() -> str:
    """The minimal configuration as text."""
    return MINIMAL


@pytest.fixture
def minimal(write: Write) -> Path:
    """The minimal configuration as a file."""
    return write(MINIMAL)
