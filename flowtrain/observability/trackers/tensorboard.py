"""TensorBoard, by tensorboardX: event files that ``tensorboard --logdir`` shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flowtrain.observability.callback import Callback
from flowtrain.observability.trackers.scalars import checkpoint_scalars, evaluation_scalars, step_scalars
from flowtrain.types.run_events import (
    CheckpointFinished,
    EvaluationFinished,
    GeneratedSample,
    RunEnded,
    RunStarted,
    StepFinished,
)

FLUSH_S = 10
"""The longest that written values wait in memory."""


class TensorBoardTracker(Callback):
    """Writes event files into ``tensorboard/`` of the run's directory. options: of tensorboardX's ``SummaryWriter``."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._writer: Any = None
        self._directory = Path()

    def on_run_start(self, event: RunStarted) -> None:
        """Open the files; those of a run that is resumed forget later steps."""
        from tensorboardX import SummaryWriter

        self._directory = Path(event.directory)
        options: dict[str, Any] = {"logdir": str(self._directory / "tensorboard"), "flush_secs": FLUSH_S}
        if event.resumed_from is not None:
            options["purge_step"] = event.resumed_from + 1
        self._writer = SummaryWriter(**options | self._options)
        self._writer.add_text("config", _code(json.dumps(event.config, indent=2)), event.step)

    def on_step(self, event: StepFinished) -> None:
        """Write a step's numbers."""
        self._add(step_scalars(event.metrics), event)

    def on_evaluation(self, event: EvaluationFinished) -> None:
        """Write the loss of a held-out set, and what the model generated."""
        self._add(evaluation_scalars(event), event)
        for number, sample in enumerate(event.generated):
            tag = f"eval/{event.name}/{number}"
            self._writer.add_text(tag, _code(_shown(sample)), event.step, event.timestamp)
            for index, file in enumerate(sample.images):
                with Image.open(self._directory / file) as image:
                    pixels = np.asarray(image.convert("RGB"))
                self._writer.add_image(f"{tag}/{index}", pixels, event.step, event.timestamp, dataformats="HWC")

    def on_checkpoint(self, event: CheckpointFinished) -> None:
        """Write how long a checkpoint took."""
        self._add(checkpoint_scalars(event), event)

    def on_run_end(self, event: RunEnded) -> None:
        """Close the files."""
        if self._writer is not None:
            self._writer.close()

    def _add(self, scalars: dict[str, float], event: StepFinished | EvaluationFinished | CheckpointFinished) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, event.step, event.timestamp)


def _shown(sample: GeneratedSample) -> str:
    return f"{sample.prompt}\n\nreference: {sample.reference}\n\ngenerated: {sample.text}"


def _code(text: str) -> str:
    """A text as a block of code in Markdown, so that nothing in it is read as Markdown."""
    return "\n".join(f"    {line}" for line in text.splitlines())
