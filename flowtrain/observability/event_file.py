"""``events.jsonl``: one object for each thing that a run tells, steps excepted."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from flowtrain.observability.diagnostics import Diagnostic
from flowtrain.observability.files import JsonLines
from flowtrain.types.metrics import finite
from flowtrain.types.run_events import (
    EVENTS_SCHEMA,
    ActorLost,
    CheckpointFinished,
    EvaluationFinished,
    Noted,
    Quarantined,
    Restarted,
    RunEnded,
    RunEvent,
    RunStarted,
    StepFinished,
    StragglerFound,
)

MAX_TEXT_LENGTH = 10_000
"""Characters of a text; the rest is cut off."""
MAX_WAITING_NBYTES = 8 << 20
"""Lines that memory holds while they cannot be written; later ones are lost."""

NAMES: dict[type, str] = {
    RunStarted: "run_started",
    EvaluationFinished: "evaluation",
    CheckpointFinished: "checkpoint",
    ActorLost: "lost",
    Restarted: "restart",
    Quarantined: "quarantined",
    StragglerFound: "straggler",
    Noted: "note",
    RunEnded: "run_ended",
}
"""What each kind of event is called in the file."""
NOT_WRITTEN = frozenset({"config", "directory", "emulated"})
"""Fields that the run's other files have."""


class EventFile:
    """Appends events to a file; each line reaches the operating system at once. Steps go to ``metrics.jsonl`` alone.

    Training does not need it: what cannot be written now is tried again with the next event.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: JsonLines | None = None
        self._output = Diagnostic(path.name, retries=True)

    def take(self, event: RunEvent) -> None:
        """Write an event."""
        if not isinstance(event, StepFinished):
            self._output.attempt(self._append, event_record(event))

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._lines is not None:
            self._output.close(self._lines.close)

    def _append(self, record: dict[str, Any]) -> None:
        if self._lines is None:
            lines = JsonLines(self._path)
            try:
                lines.keep(lambda record: True)  # a kill may have torn the last line
            except BaseException:
                lines.close()  # each event tries again
                raise
            self._lines = lines
        if self._lines.waiting_nbytes > MAX_WAITING_NBYTES:
            self._lines.flush()
        self._lines.append(record)


def event_record(event: RunEvent) -> dict[str, Any]:
    """Return an event's JSON object."""
    values = _plain(event)
    record = {"schema": EVENTS_SCHEMA, "timestamp": values.pop("timestamp"), "event": NAMES[type(event)]}
    written: dict[str, Any] = finite(record | {"step": values.pop("step")} | values)
    return written


def _plain(value: Any) -> Any:
    """Records as mappings, and texts cut to their longest length."""
    if is_dataclass(value):
        return {
            field.name: _plain(getattr(value, field.name)) for field in fields(value) if field.name not in NOT_WRITTEN
        }
    if isinstance(value, str):
        return value[:MAX_TEXT_LENGTH]
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value
