"""The interface of whoever follows a run: trackers, the display, a class of the user's own."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Iterator
from types import FunctionType

from flowtrain.errors import ConfigError
from flowtrain.types.run_events import (
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

    def on_actor_lost(self, event: ActorLost) -> None:
        """An actor died or hangs."""

    def on_restart(self, event: Restarted) -> None:
        """A lost actor was started again; it works if ``down_s`` is known."""

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
    ActorLost: "on_actor_lost",
    Restarted: "on_restart",
    Quarantined: "on_quarantine",
    StragglerFound: "on_straggler",
    Noted: "on_note",
    RunEnded: "on_run_end",
}
_LIKENESS = 0.7
"""From which on a name is a misspelt one; ``on_`` alone makes short names half alike."""


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
    """Return what is wrong with the methods of a callback, or of a class of callbacks; None if nothing is.

    Runs none of the callback's code, such as properties.
    """
    known = tuple(_METHODS.values())
    for name in _other_methods(callback if isinstance(callback, type) else type(callback), known):
        if near := difflib.get_close_matches(name, known, n=1, cutoff=_LIKENESS):
            return f"has a method {name}, which no event calls; did you mean {near[0]}? If not, give it another name"
    # A class with ``__getattr__`` may have them all the same, and so may the objects that a class makes in its own way.
    if _has_any(callback, (*known, "__getattr__")) or (isinstance(callback, type) and _makes_objects(callback)):
        return None
    return f"has none of the methods that events call; give it at least one of {', '.join(known)}"


def _other_methods(cls: type, known: tuple[str, ...]) -> Iterator[str]:
    """Yield the methods that are named like those of events, but for those that another library's base class has."""
    foreign = {name for base in cls.__mro__[1:] if not _has_any(base, known) for name in vars(base)}
    for each in cls.__mro__:
        for name, value in vars(each).items():
            is_method = isinstance(value, FunctionType | classmethod | staticmethod)
            if is_method and name.startswith("on_") and name not in foreign and name not in known:
                yield name


def _has_any(callback: object, names: Iterable[str]) -> bool:
    """Whether an attribute with one of these names is a method, or may give one, as properties and slots do."""
    found = (inspect.getattr_static(callback, name, None) for name in names)
    return any(callable(each) or hasattr(type(each), "__get__") for each in found)


def _makes_objects(cls: type) -> bool:
    return any(name in vars(each) for each in cls.__mro__ if each is not object for name in ("__init__", "__new__"))
