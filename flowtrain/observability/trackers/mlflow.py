"""MLflow, by its client: nothing of its per-thread state is used."""

from __future__ import annotations

from dataclasses import asdict
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

EXPERIMENT = "flowtrain"
_STATUS = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowTracker(Callback):
    """Logs into a run of MLflow. Credentials come from the environment (``MLFLOW_TRACKING_TOKEN`` and others).

    tracking_uri: of the server; by default ``MLFLOW_TRACKING_URI``. experiment: its name; it is created if needed.
    """

    def __init__(self, tracking_uri: str | None = None, experiment: str = EXPERIMENT) -> None:
        self._tracking_uri = tracking_uri
        self._experiment = experiment
        self._client: Any = None
        self._run_id = ""
        self._directory = Path()

    def on_run_start(self, event: RunStarted) -> None:
        """Begin a run there, or go on with that of the run which is resumed."""
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=self._tracking_uri)
        self._directory = Path(event.directory)
        resumes = event.resumed_from is not None
        self._run_id, is_known = kept_id(event.directory, "mlflow", resumes, lambda: self._created(event.run))
        if is_known:
            self._client.update_run(self._run_id, status="RUNNING")
            return
        for key, value in (("mode", event.mode), ("num_steps", event.num_steps), ("device", event.device)):
            self._client.log_param(self._run_id, key, value)
        self._client.log_dict(self._run_id, dict(event.config), "config.json")

    def on_step(self, event: StepFinished) -> None:
        """Log a step's numbers."""
        self._log(step_scalars(event.metrics), event)

    def on_evaluation(self, event: EvaluationFinished) -> None:
        """Log the loss of a held-out set, and what the model generated."""
        self._log(evaluation_scalars(event), event)
        if not event.generated:
            return
        place = f"generated/{event.step:08d}"
        samples = {"samples": [asdict(sample) for sample in event.generated]}
        self._client.log_dict(self._run_id, samples, f"{place}/{event.name}.json")
        for file in (file for sample in event.generated for file in sample.images):
            self._client.log_artifact(self._run_id, str(self._directory / file), place)

    def on_checkpoint(self, event: CheckpointFinished) -> None:
        """Log how long a checkpoint took."""
        self._log(checkpoint_scalars(event), event)

    def on_restart(self, event: Restarted) -> None:
        """Log what the loss of an actor cost; steps that are made again follow under their numbers."""
        self._log(restart_scalars(event), event)

    def on_run_end(self, event: RunEnded) -> None:
        """End the run there."""
        if self._run_id:
            self._client.set_terminated(self._run_id, status=_STATUS[event.outcome])

    def _created(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(self._experiment)
        number = experiment.experiment_id if experiment else self._client.create_experiment(self._experiment)
        run_id: str = self._client.create_run(number, run_name=name).info.run_id
        return run_id

    def _log(
        self, scalars: dict[str, float], event: StepFinished | EvaluationFinished | CheckpointFinished | Restarted
    ) -> None:
        from mlflow.entities import Metric

        timestamp_ms = int(event.timestamp * 1000)
        metrics = [Metric(_key(name), value, timestamp_ms, event.step) for name, value in scalars.items()]
        self._client.log_batch(self._run_id, metrics=metrics)


def _key(name: str) -> str:
    """A name with only the signs that MLflow takes."""
    return "".join(sign if sign.isalnum() or sign in "_-./ :" else "_" for sign in name)
