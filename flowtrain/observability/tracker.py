"""Runs a callback that training must never wait for: behind a queue, in a thread of its own."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from flowtrain.observability.callback import deliver
from flowtrain.types.run_events import RunEnded, RunEvent, RunStarted

logger = logging.getLogger(__name__)

MAX_WAITING = 1024
"""Events that may wait for a tracker."""
MAX_CALL_S = 120.0
"""The longest that one call of a tracker may take."""


class Tracker:
    """A callback in a daemon thread. One that fails, hangs or falls too far behind is off, with one problem to tell.

    name: what the user reads. make: builds the callback, in the thread: imports and connections may be slow.
    clock: monotonic, in seconds.
    """

    def __init__(self, name: str, make: Callable[[], object], clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.step: int | None = None
        """Of the last event that it got; None: it got none."""
        self._make = make
        self._clock = clock
        self._events: queue.Queue[RunEvent | None] = queue.Queue(MAX_WAITING)
        # What happened before the start; None once it is passed on. A tracker gets the start first.
        self._early: list[RunEvent] | None = []
        self._lock = threading.Lock()
        self._is_off = False
        self._problem: str | None = None
        self._called_s: float | None = clock()  # since when a call runs; None: none does
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, event: RunEvent) -> None:
        """Pass an event on; returns at once."""
        if self._is_off:
            return
        for each in self._in_order(event):
            self._put(each)
        called_s = self._called_s
        if called_s is not None and self._clock() - called_s > MAX_CALL_S:
            self._switch_off(f"a call has not returned for {MAX_CALL_S:g} s")

    def end(self) -> None:
        """Let the thread end after the events that wait."""
        if not self._is_off:
            self._put(None)

    def join(self, deadline_s: float) -> None:
        """Wait for the thread's end, at most until a time of the monotonic clock; not at all for a tracker that is off.

        An unfinished one is off then.
        """
        if self._is_off:
            return
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._thread.is_alive():
            self._switch_off(f"it has not taken the last {self._events.qsize()} events, and the run ends without it")

    def take_problem(self) -> str | None:
        """Return why the tracker is off, once; None otherwise."""
        with self._lock:
            problem, self._problem = self._problem, None
        return problem

    def _in_order(self, event: RunEvent) -> list[RunEvent]:
        if self._early is None:
            return [event]
        if not isinstance(event, RunStarted | RunEnded):
            self._early.append(event)
            return []
        early, self._early = self._early, None
        return [event, *early] if isinstance(event, RunStarted) else [*early, event]

    def _put(self, event: RunEvent | None) -> None:
        try:
            self._events.put_nowait(event)
        except queue.Full:
            self._switch_off(f"it is {MAX_WAITING} events behind")

    def _run(self) -> None:
        try:
            callback = self._make()
            self._called_s = None
            while (event := self._events.get()) is not None and not self._is_off:
                self._called_s, self.step = self._clock(), event.step
                deliver(callback, event)
                self._called_s = None
        except BaseException as error:  # whatever it is, training is worth more
            if not self._is_off:
                logger.warning("tracker %s failed with", self.name, exc_info=error)
            self._switch_off(described(error))

    def _switch_off(self, why: str) -> None:
        with self._lock:
            if self._is_off:
                return
            self._is_off = True
            self._problem = why
        with suppress(queue.Empty):
            while True:
                self._events.get_nowait()
        with suppress(queue.Full):
            self._events.put_nowait(None)  # the thread may wait for an event


def described(error: BaseException) -> str:
    """Return an error's class and text, and the place in a file where it was raised."""
    text = f"{type(error).__name__}: {error}"
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith("<frozen")]
    if isinstance(error, SyntaxError) or not frames:  # a SyntaxError's text has its place
        return text
    last, home = frames[-1], os.path.expanduser("~/")
    # Warnings go to the run's files and to other trackers, which see no home directory.
    file = f"~/{last.filename.removeprefix(home)}" if last.filename.startswith(home) else last.filename
    return f"{text} ({file}:{last.lineno}, in {last.name})"
