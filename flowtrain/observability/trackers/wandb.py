"""Weights & Biases."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from flowtrain.observability.callback import Callback
from flowtrain.observability.trackers.scalars import (
    checkpoint_scalars,
    evaluation_scalars,
    kept_id,
    restart_scalars,
    step_scalars,
)
from flowtrain.types.run_events import (
    CheckpointFinished,
    EvaluationFinished,
    Restarted,
    RunEnded,
    RunStarted,
    StepFinished,
)

PROJECT = "flowtrain"
COLUMNS = ("source", "row", "prompt", "reference", "text", "image")


class WandbTracker(Callback):
    """Logs into a run of Weights & Biases. options: of ``wandb.init``; the key comes from ``WANDB_API_KEY``."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._run: Any = None
        self._directory = Path()

    def on_run_start(self, event: RunStarted) -> None:
        """Begin a run there, or go on with that of the run which is resumed."""
        import wandb

        self._directory = Path(event.directory)
        run_id, _ = kept_id(event.directory, "wandb", event.resumed_from is not None, lambda: secrets.token_hex(4))
        options: dict[str, Any] = {
            "project": PROJECT,
            "name": event.run,
            "id": run_id,
            "resume": "allow",
            "dir": event.directory,
            "config": dict(event.config),
            "settings": {"console": "off"},  # the driver's output stays the driver's
        }
        self._run = wandb.init(**options | self._options)
        # A resumed run repeats steps, and W&B's own counter only goes up.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def on_step(self, event: StepFinished) -> None:
        """Log a step's numbers."""
        self._run.log({"step": event.step, **step_scalars(event.metrics)})

    def on_evaluation(self, event: EvaluationFinished) -> None:
        """Log the loss of a held-out set, and a table of what the model generated."""
        values: dict[str, Any] = {"step": event.step, **evaluation_scalars(event)}
        if event.generated:
            values[f"eval/{event.name}/generated"] = self._table(event)
        self._run.log(values)

    def on_checkpoint(self, event: CheckpointFinished) -> None:
        """Log how long a checkpoint took."""
        self._run.log({"step": event.step, **checkpoint_scalars(event)})

    def on_restart(self, event: Restarted) -> None:
        """Log what the loss of an actor cost; steps that are made again follow under their numbers."""
        self._run.log({"step": event.step, **restart_scalars(event)})

    def on_run_end(self, event: RunEnded) -> None:
        """Finish the run there; it counts as failed unless it is done."""
        if self._run is not None:
            self._run.finish(exit_code=0 if event.outcome == "done" else 1)

    def _table(self, event: EvaluationFinished) -> Any:
        import wandb

        table = wandb.Table(columns=list(COLUMNS))
        for sample in event.generated:
            first = next(iter(sample.images), None)
            image = wandb.Image(str(self._directory / first)) if first is not None else None
            table.add_data(sample.source, sample.row, sample.prompt, sample.reference, sample.text, image)
        return table
