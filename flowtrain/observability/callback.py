"""The interface of whoever follows a run: trackers, the display, a class of the user's own."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable

from flowtrain.errors import ConfigError
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


def check_callbacks(callbacks: Iterable[object]) -> list[object]:
    """Return what a caller gave as ``callbacks``; raises ConfigError if it is no list of objects that follow a run."""
    if isinstance(callbacks, type):
        raise ConfigError(
            f"callbacks is the class {callbacks.__name__}; give a list of objects: callbacks=[{callbacks.__name__}()]"
        )
    if not isinstance(callbacks, Iterable) or isinstance(callbacks, Callback):
        kind = type(callbacks).__name__
        raise ConfigError(f"callbacks is of class {kind}; give a list of objects, such as callbacks=[Board()]")
    given = list(callbacks)
    for index, callback in enumerate(given):
        if isinstance(callback, type):
            name = callback.__name__
            raise ConfigError(f"callbacks[{index}] is the class {name}; give an object of it: {name}()")
        if (fault := method_fault(callback)) is not None:
            raise ConfigError(f"callbacks[{index}], of class {type(callback).__name__}, {fault}")
    return given


def method_fault(callback: object) -> str | None:
    """Return what is wrong with the methods of a callback, or of a class of callbacks; None if nothing is."""
    known = list(_METHODS.values())
    for name in dir(callback):
        if name.startswith("on_") and name not in known and _is_method(callback, name):
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"did you mean {near[0]}? " if near else f"the methods are {', '.join(known)}. "
            return f"has a method {name}, which no event calls; {meant}Other methods may not begin with on_"
    # A class with ``__getattr__`` may have them all the same.
    if any(_is_method(callback, name) for name in (*known, "__getattr__")):
        return None
    return f"has none of the methods that events call; give it at least one of {', '.join(known)}"


def _is_method(callback: object, name: str) -> bool:
    """Whether an attribute is a method; runs none of the callback's code, such as properties."""
    found = inspect.getattr_static(callback, name, None)
    return callable(found) or isinstance(found, classmethod)
