"""What all trackers show of a step and of an evaluation, and under which id they know a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flowtrain.observability.files import replace_text
from flowtrain.types.metrics import StepMetrics
from flowtrain.types.run_events import CheckpointFinished, EvaluationFinished, Restarted

_LEFT_OUT = frozenset({"schema", "timestamp", "step", "peak_flops", "skipped", "spike", "rewound_to"})


def step_scalars(metrics: StepMetrics) -> dict[str, float]:
    """Return the numbers of a step by the keys of ``metrics.jsonl``, without those that are null.

    Keys of a mapping follow a slash, as in ``source_losses/cats``; of several slots the highest value counts.
    """
    scalars: dict[str, float] = {}
    for key, value in metrics.as_record().items():
        if key in _LEFT_OUT:
            continue
        if isinstance(value, dict):
            scalars |= {f"{key}/{name}": each for name, each in value.items() if each is not None}
        elif key == "slot_imbalance" and value:
            scalars[key] = max(value)
        elif isinstance(value, int | float):
            scalars[key] = value
    return scalars


def evaluation_scalars(event: EvaluationFinished) -> dict[str, float]:
    """Return the numbers of an evaluation."""
    return {f"eval/{event.name}/loss": event.loss, f"eval/{event.name}/duration_s": event.duration_s}


def checkpoint_scalars(event: CheckpointFinished) -> dict[str, float]:
    """Return the numbers of a checkpoint."""
    scalars = {"checkpoint/duration_s": event.duration_s}
    return scalars if event.nbytes is None else scalars | {"checkpoint/nbytes": event.nbytes}


def restart_scalars(event: Restarted) -> dict[str, float]:
    """Return what the loss of an actor cost, by its role."""
    scalars = {"steps_again": float(event.steps_again), "down_s": event.down_s, "hung_s": event.hung_s}
    return {f"restart/{event.role}/{name}": value for name, value in scalars.items() if value is not None}


def kept_id(directory: str, tracker: str, resumes: bool, make: Callable[[], str]) -> tuple[str, bool]:
    """Return under which id a tracker knows the run, and whether it knows it already.

    A run that is resumed goes on under the id that its directory has; otherwise ``make`` gives a new one, which is kept
    there.
    """
    path = Path(directory) / f".{tracker}-id"
    if resumes and path.is_file():
        return path.read_text(encoding="utf-8").strip(), True
    made = make()
    replace_text(path, made)
    return made, False
