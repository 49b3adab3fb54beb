"""TensorBoard, by tensorboardX: event files that ``tensorboard --logdir`` shows."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flowtrain.config.home import expanded
from flowtrain.observability.callback import Callback
from flowtrain.observability.files import PRIVATE_DIRECTORY
from flowtrain.observability.trackers.scalars import (
    checkpoint_scalars,
    evaluation_scalars,
    restart_scalars,
    step_scalars,
)
from flowtrain.types.run_events import (
    CheckpointFinished,
    EvaluationFinished,
    GeneratedSample,
    Restarted,
    RunEnded,
    RunStarted,
    StepFinished,
)

FLUSH_S = 5.0
"""Steps that wait longer reach the file with the next event, all else at once; TensorBoard looks every 30 s."""


class TensorBoardTracker(Callback):
    """Writes event files, one event for all numbers of a step.

    It takes the part of tensorboardX that writes at once. ``SummaryWriter`` writes in a thread of its own, and once a
    full disk has ended that, waits for it for ever, also when the process ends.

    logdir: by default ``tensorboard/`` in the run's directory.
    """

    def __init__(self, logdir: str | None = None) -> None:
        self._logdir = logdir
        self._writer: Any = None
        self._flushed_s = -FLUSH_S
        self._directory = Path()

    def on_run_start(self, event: RunStarted) -> None:
        """Open a file; those of a run that is resumed forget later steps."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.summary import text

        self._directory = Path(event.directory)
        directory = expanded(self._logdir) if self._logdir is not None else self._directory / "tensorboard"
        directory.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        self._writer = EventsWriter(str(directory / "events"))
        if event.resumed_from is not None:
            self._forget_after(event)
        self._write(text("config", _code(json.dumps(event.config, indent=2))), event)

    def on_step(self, event: StepFinished) -> None:
        """Write a step's numbers."""
        self._write_scalars(step_scalars(event.metrics), event)

    def on_evaluation(self, event: EvaluationFinished) -> None:
        """Write the loss of a held-out set, and what the model generated."""
        from tensorboardX.summary import image, text

        self._write_scalars(evaluation_scalars(event), event)
        for number, sample in enumerate(event.generated):
            tag = f"eval/{event.name}/{number}"
            self._write(text(tag, _code(_shown(sample))), event)
            for index, file in enumerate(sample.images):
                with Image.open(self._directory / file) as picture:
                    pixels = np.asarray(picture.convert("RGB"))
                self._write(image(f"{tag}/{index}", pixels, dataformats="HWC"), event)

    def on_checkpoint(self, event: CheckpointFinished) -> None:
        """Write how long a checkpoint took."""
        self._write_scalars(checkpoint_scalars(event), event)

    def on_restart(self, event: Restarted) -> None:
        """Forget the steps that are made again, if the run went back, and write what the loss of an actor cost."""
        if event.steps_again:
            self._forget_after(event)
        self._write_scalars(restart_scalars(event), event)

    def on_run_end(self, event: RunEnded) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()

    def _forget_after(self, event: RunStarted | Restarted) -> None:
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        again = SessionLog(status=SessionLog.START)  # TensorBoard drops what it has of this step and later ones
        self._writer.write_event(Event(wall_time=event.timestamp, step=event.step + 1, session_log=again))
        self._writer.flush()

    def _write_scalars(
        self, scalars: dict[str, float], event: StepFinished | EvaluationFinished | CheckpointFinished | Restarted
    ) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._write(Summary(value=values), event)

    def _write(
        self, summary: Any, event: RunStarted | StepFinished | EvaluationFinished | CheckpointFinished | Restarted
    ) -> None:
        """Write a summary; raises OSError if the disk refuses it."""
        from tensorboardX.proto.event_pb2 import Event

        self._writer.write_event(Event(wall_time=event.timestamp, step=event.step, summary=summary))
        if not isinstance(event, StepFinished) or time.monotonic() - self._flushed_s >= FLUSH_S:  # it syncs the disk
            self._writer.flush()
            self._flushed_s = time.monotonic()


def _shown(sample: GeneratedSample) -> str:
    return f"{sample.prompt}\n\nreference: {sample.reference}\n\ngenerated: {sample.text}"


def _code(text: str) -> str:
    """A text as a block of code in Markdown, so that nothing in it is read as Markdown."""
    return "\n".join(f"    {line}" for line in text.splitlines())
