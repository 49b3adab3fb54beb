"""Rates over all steps since a start."""

from __future__ import annotations

from flowtrain.observability.metrics import StepMetrics


class RunRates:
    """Adds up tokens and times of steps; the first one is left out, since everything is made in it.

    time_scale: seconds of this machine in one of the metrics' (``emulated.time_scale``).
    """

    def __init__(self, time_scale: float = 1.0) -> None:
        self._time_scale = time_scale
        self._num_steps = self._num_tokens = 0
        self._seconds = 0.0
        self._host_s: float | None = None

    def take(self, metrics: StepMetrics) -> None:
        """Add a step."""
        self._num_steps += 1
        if self._num_steps == 1:
            return
        self._num_tokens += metrics.num_tokens
        self._seconds += metrics.step_time_s
        if metrics.host_s is not None:
            self._host_s = (self._host_s or 0.0) + metrics.host_s

    @property
    def tokens_per_s(self) -> float | None:
        """None after fewer than two steps."""
        return self._num_tokens / self._seconds if self._seconds else None

    @property
    def host_share(self) -> float | None:
        """Share of the wall time in which emulated ranks wait for this machine's own work; None on real devices."""
        return None if self._host_s is None else self._host_s / (self._seconds * self._time_scale)
