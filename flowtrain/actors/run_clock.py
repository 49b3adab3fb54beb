"""The run's clock in an actor: that of the coordinator, whichever node the actor is on."""

from __future__ import annotations

import logging
import time

from flowtrain.actors.link import CoordinatorLink
from flowtrain.flow.api import CoordinatorApi
from flowtrain.observability.clocks import ClockOffset, monotonic_clock_name

logger = logging.getLogger(__name__)

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

    def follow(self, link: CoordinatorLink) -> None:
        """Take over the coordinator's clock."""
        reading = link.ask(CoordinatorApi.clock)
        self._epoch_s = reading.epoch_s
        if reading.clock == monotonic_clock_name():
            return
        self._link = link
        self._measure(link)
        logger.info(
            "the clock of the coordinator's node is %.6f s ahead, within %.6f s",
            self._offset.value_s,
            self._offset.error_s,
        )

    def refresh(self) -> None:
        """Measure again if that is due; asks the coordinator then."""
        if self._link is not None and time.monotonic() - self._measured_s >= MEASURE_EVERY_S:
            self._measure(self._link)

    def of(self, monotonic_s: float) -> float:
        """Return the run's time of a moment on this process's monotonic clock."""
        return monotonic_s + self._offset_s + self._epoch_s

    @property
    def _offset_s(self) -> float:
        return 0.0 if self._link is None else self._offset.value_s

    def _measure(self, link: CoordinatorLink) -> None:
        for _ in range(ROUND_TRIPS):
            sent_s = time.monotonic()
            there_s = link.ask(CoordinatorApi.clock).now_s
            self._offset.round_trip(sent_s, there_s, time.monotonic())
        self._measured_s = time.monotonic()
