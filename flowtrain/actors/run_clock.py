"""The run's clock in an actor: that of the coordinator, whichever node the actor is on."""

from __future__ import annotations

import time

from flowtrain.actors.link import CoordinatorLink
from flowtrain.flow.api import CoordinatorApi
from flowtrain.observability.clocks import ClockOffset, monotonic_clock_name

ROUND_TRIPS = 8
"""Of them the fastest decides: the others waited somewhere."""
MEASURE_EVERY_S = 60.0


class RunClock:
    """Turns this process's monotonic time into the run's clock: seconds since the Unix epoch, by the coordinator.

    Processes of one node have one monotonic clock, so that nothing is measured there. On other nodes round trips
    measure the offset, and again every ``MEASURE_EVERY_S``. Before ``follow`` it is this process's own wall clock.
    """

    def __init__(self) -> None:
        self._epoch_s = time.time() - time.monotonic()
        self._link: CoordinatorLink | None = None
        self._offset = ClockOffset()
        self._measured_s = 0.0

    def follow(self, link: CoordinatorLink) -> bool:
        """Take over the coordinator's clock; returns whether its offset had to be measured."""
        reading = link.ask(CoordinatorApi.clock)
        self._epoch_s = reading.epoch_s
        if reading.clock == monotonic_clock_name():
            return False
        self._measure(link)
        self._link = link
        return True

    def refresh(self) -> bool:
        """Measure again if that is due; returns whether it was, and so the coordinator was asked."""
        if self._link is None or time.monotonic() - self._measured_s < MEASURE_EVERY_S:
            return False
        self._measure(self._link)
        return True

    def of(self, monotonic_s: float) -> float:
        """Return the run's time of a moment on this process's monotonic clock."""
        return monotonic_s + self.offset_s + self._epoch_s

    @property
    def offset_s(self) -> float:
        """How far the coordinator's monotonic clock is ahead of this process's; 0 if they are one."""
        return 0.0 if self._link is None else self._offset.value_s

    @property
    def error_s(self) -> float:
        """By how much ``offset_s`` may be wrong."""
        return 0.0 if self._link is None else self._offset.error_s

    def _measure(self, link: CoordinatorLink) -> None:
        for _ in range(ROUND_TRIPS):
            sent_s = time.monotonic()
            there_s = link.ask(CoordinatorApi.clock).now_s
            self._offset.round_trip(sent_s, there_s, time.monotonic())
        self._measured_s = time.monotonic()
