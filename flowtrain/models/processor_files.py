"""The files of HF processors that cannot be built here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import BaseImageProcessor, PreTrainedTokenizerBase


@dataclass(frozen=True)
class ProcessorFiles:
    """Writes the files of an HF processor of images and videos, as its class does.

    Such a class cannot be built without torchvision, which its video processor needs. Therefore the settings of the
    video processor are only passed on.
    """

    processor_class: str
    """Name of HF's class."""
    image_processor: BaseImageProcessor
    tokenizer: PreTrainedTokenizerBase
    video: Mapping[str, Any]
    """Settings of the video processor, its class among them."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The processor's own."""

    def save_pretrained(self, save_directory: Path) -> None:
        """Write processor and tokenizer into a directory."""
        processor = {
            "image_processor": json.loads(self.image_processor.to_json_string()),
            "processor_class": self.processor_class,
            "video_processor": dict(self.video),
            **self.settings,
        }
        text = json.dumps(processor, indent=2, sort_keys=True) + "\n"
        (save_directory / "processor_config.json").write_text(text, encoding="utf-8")
        self.tokenizer.save_pretrained(save_directory)
