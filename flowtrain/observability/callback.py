"""The interface of whoever follows a run: trackers, the display, a class of the user's own."""

from __future__ import annotations

from flowtrain.types.run_events import (
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


class Callback:
    """Follows a run. Override the methods that you need; each gets one event (``flowtrain/types/run_events.py``).

    Callbacks of ``flowtrain.train(..., callbacks=[...])`` and ``observability.trackers`` are called in a thread of
    their own in the driver's process, in the order of the events. One that raises, or that falls far behind, is
    switched off with a warning; training goes on.
    """

    def on_run_start(self, event: RunStarted) -> None:
        """All actors have started."""

    def on_step(self, event: StepFinished) -> None:
        """A training step is done, and so is the evaluation that may follow it."""

    def on_evaluation(self, event: EvaluationFinished) -> None:
        """A held-out set was evaluated."""

    def on_checkpoint(self, event: CheckpointFinished) -> None:
        """A checkpoint is complete."""

    def on_restart(self, event: Restarted) -> None:
        """An actor died and was started again."""

    def on_quarantine(self, event: Quarantined) -> None:
        """A sample was rejected."""

    def on_straggler(self, event: StragglerFound) -> None:
        """An encoder or a replica of the backbone is much slower than the others."""

    def on_note(self, event: Noted) -> None:
        """A line for the user."""

    def on_run_end(self, event: RunEnded) -> None:
        """The run is over; also called for one that failed before its start."""


_METHODS: dict[type, str] = {
    RunStarted: "on_run_start",
    StepFinished: "on_step",
    EvaluationFinished: "on_evaluation",
    CheckpointFinished: "on_checkpoint",
    Restarted: "on_restart",
    Quarantined: "on_quarantine",
    StragglerFound: "on_straggler",
    Noted: "on_note",
    RunEnded: "on_run_end",
}


def deliver(callback: object, event: RunEvent) -> None:
    """Call the method for an event; an object that lacks it, such as a class that is no ``Callback``, gets nothing."""
    method = getattr(callback, _METHODS[type(event)], None)
    if method is not None:
        method(event)
