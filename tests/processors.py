"""HF's processors where torchvision is not installed."""

from __future__ import annotations

import importlib.util

import pytest
from transformers import ProcessorMixin
from transformers.models.auto.video_processing_auto import AutoVideoProcessor


def leave_out_videos(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let HF's processors load without their video half, which needs torchvision; all else is as it is."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    check = ProcessorMixin.check_argument_for_proper_class
    monkeypatch.setattr(AutoVideoProcessor, "from_pretrained", lambda *args, **kwargs: None)
    monkeypatch.setattr(
        ProcessorMixin,
        "check_argument_for_proper_class",
        lambda self, name, argument: None if name == "video_processor" else check(self, name, argument),
    )
