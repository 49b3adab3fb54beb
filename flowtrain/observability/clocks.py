"""Clocks of several processes: which of them are one, and by how much others differ."""

from __future__ import annotations

import math
import uuid
from pathlib import Path

MAX_DRIFT = 2e-4
"""Two computers' clocks move apart by less than this share of the time that passes; quartz is good for half of it."""
_BOOT, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/time")


def monotonic_clock_name() -> str:
    """Return a name of this process's monotonic clock: equal names, one clock.

    It is the clock of the kernel since its boot, in a time namespace. Where the kernel does not say which, no two
    processes have the same name.
    """
    try:
        boot = _BOOT.read_text().strip()
    except OSError:
        return uuid.uuid4().hex
    try:
        return f"{boot} {_NAMESPACE.readlink()}"
    except OSError:  # a kernel without time namespaces
        return boot


class ClockOffset:
    """What one adds to the time of a clock to get that of another: an interval, which measurements narrow.

    max_drift: the clocks move apart by at most this share of the time that passes.
    """

    def __init__(self, max_drift: float = MAX_DRIFT) -> None:
        self._max_drift = max_drift
        self._low_s, self._high_s, self._at_s = -math.inf, math.inf, 0.0

    def round_trip(self, sent_s: float, there_s: float, received_s: float) -> None:
        """Take in a question and its answer: the other clock showed ``there_s`` when it answered.

        sent_s, received_s: on this clock, before and after. The offset lies between ``there_s - received_s`` and
        ``there_s - sent_s``, so its middle is wrong by at most half of the round trip. Earlier round trips narrow the
        interval, by as much as the clocks cannot have moved apart since. An answer that contradicts them replaces them:
        a clock was set, or stood still.
        """
        moved_s = self._max_drift * abs(received_s - self._at_s)
        low_s, high_s = there_s - received_s, there_s - sent_s
        narrowed = max(low_s, self._low_s - moved_s), min(high_s, self._high_s + moved_s)
        self._low_s, self._high_s = narrowed if narrowed[0] <= narrowed[1] else (low_s, high_s)
        self._at_s = sent_s  # the offset was measured then, or up to ``received_s``

    @property
    def value_s(self) -> float:
        """The middle of the interval. There must have been a round trip."""
        return (self._low_s + self._high_s) / 2

    @property
    def error_s(self) -> float:
        """Half of the interval: ``value_s`` was wrong by at most this when the other clock answered last."""
        return (self._high_s - self._low_s) / 2
