"""The stream of a run's events, and what takes part in it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from flowtrain.observability.diagnostics import Diagnostic
from flowtrain.observability.tracker import Tracker
from flowtrain.types.run_events import Level, Noted, RunEvent

logger = logging.getLogger(__name__)

Take = Callable[[RunEvent], object]

FINISH_S = 20.0
"""Longest wait for all trackers together at the end of a run."""


class EventStream:
    """Hands each event to its sinks, one after another, and to the trackers, which run in threads of their own.

    Use it from one thread.

    first_step: steps that were done before this start.
    """

    def __init__(self, first_step: int = 0) -> None:
        self.step = first_step
        """The last step of which an event has told."""
        self._first_step = first_step
        self.off: list[str] = []
        """Which trackers are off, since which step and why; complete after ``close``."""
        self._sinks: list[Take] = []
        self._trackers: list[Tracker] = []

    def add(self, take: Take, diagnostic: str | None = None) -> None:
        """Add a sink. diagnostic: name of one that training does not need; its first error is logged and ends it alone.

        An error of any other sink is raised by ``emit``.
        """
        if diagnostic is None:
            self._sinks.append(take)
            return
        output = Diagnostic(diagnostic)
        self._sinks.append(lambda event: output.attempt(take, event))

    def add_trackers(self, trackers: Sequence[Tracker]) -> None:
        """Add trackers; they get all later events."""
        self._trackers.extend(trackers)

    def emit(self, event: RunEvent) -> None:
        """Hand an event to everyone; never waits for a tracker."""
        self.step = max(self.step, event.step)
        for take in self._sinks:
            take(event)
        for tracker in self._trackers:
            tracker.put(event)
        for tracker in self._trackers:
            if (problem := self._take_problem(tracker)) is not None:
                self.warn(problem)

    def note(self, text: str) -> None:
        """Tell the user something."""
        self._say("info", text)

    def warn(self, text: str) -> None:
        """Tell the user of something to change, or that went wrong."""
        self._say("warning", text)

    def _say(self, level: Level, text: str) -> None:
        self.emit(Noted(step=self.step, level=level, text=text))

    def _take_problem(self, tracker: Tracker) -> str | None:
        why = tracker.take_problem()
        if why is None:
            return None
        step = self._first_step if tracker.step is None else tracker.step
        self.off.append(f"{tracker.name} was off from step {step} on: {why}")
        return f"tracker {tracker.name} is off from now on, training goes on: {why}"

    def close(self) -> None:
        """Wait a while for the trackers, after the last event. Idempotent."""
        trackers, self._trackers = self._trackers, []
        deadline_s = time.monotonic() + FINISH_S
        for tracker in trackers:
            tracker.end()
        for tracker in trackers:
            tracker.join(deadline_s)
            if (problem := self._take_problem(tracker)) is not None:
                logger.warning("%s", problem)
