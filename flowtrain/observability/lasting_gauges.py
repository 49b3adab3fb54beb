"""Gauges that stay: Ray forgets a gauge's value when it exports it, every ten seconds by default."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Protocol

from flowtrain.observability.diagnostics import Diagnostic

REFRESH_S = 1.0
"""Shorter than any interval of Ray's exports: the longest time until a value is shown."""


class SettableGauge(Protocol):
    """What is needed of Ray's gauges."""

    def set(self, value: float, tags: dict[str, str]) -> None:
        """Show a value."""
        ...


class LastingGauges:
    """Sets gauges every second to the values that they have got, in a thread of its own until ``close``.

    A value that is set once, or less often than Ray exports, would be gone from Prometheus: steps of a minute would
    leave gaps, and no alert could find a run that makes no step. And values that come faster cost nothing: what nobody
    will read is not set.

    gauges: by name.
    """

    def __init__(self, gauges: Mapping[str, SettableGauge], every_s: float = REFRESH_S) -> None:
        self._gauges = gauges
        self._every_s = every_s
        self._values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._output = Diagnostic("Ray's metrics")
        self._thread: threading.Thread | None = None

    def set(self, name: str, value: float | None, tags: Mapping[str, str]) -> None:
        """Show a value from now on; None leaves the last one."""
        if value is None:
            return
        with self._lock:
            self._values[name, frozenset(tags.items())] = value
        if self._thread is None and not self._closed.is_set():
            self._thread = threading.Thread(target=self._run, name="gauges", daemon=True)
            self._thread.start()

    def show(self) -> None:
        """Set all gauges now."""
        with self._lock:
            values = list(self._values.items())
        for (name, tags), value in values:
            self._gauges[name].set(value, dict(tags))

    def close(self) -> None:
        """Let the values vanish. Idempotent."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while self._output.is_on and not self._closed.wait(self._every_s):
            self._output.attempt(self.show)
