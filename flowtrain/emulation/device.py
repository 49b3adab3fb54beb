"""Emulated devices: they take as long as a real one, and compute nothing.

Times are on the monotonic clock. Each wait ends at a given moment, and what follows counts from that moment, not from
the later one at which the thread wakes up: so late wake-ups do not add up.
"""

from __future__ import annotations

import threading
import time
from itertools import count


class EmulatedDevice:
    """A device whose jobs share it evenly. Any thread may use it.

    interference: time of jobs at once over the sum of their times alone.
    """

    def __init__(self, interference: float = 1.0) -> None:
        self._interference = interference
        self._changed = threading.Condition()
        self._numbers = count()
        self._left: dict[int, float] = {}
        self._ended: dict[int, float] = {}
        self._at = 0.0

    def begin(self, seconds: float, at: float) -> int:
        """Start a job of ``seconds`` at the moment ``at``; returns its number."""
        with self._changed:
            self._advance(at)
            self._at = max(self._at, at) if not self._left else self._at
            job = next(self._numbers)
            self._left[job] = seconds
            self._changed.notify_all()
            return job

    def wait(self, job: int) -> float:
        """Wait until a job is done; returns the moment at which it was."""
        with self._changed:
            while True:
                now = time.monotonic()
                self._advance(now)
                if job in self._ended:
                    return self._ended.pop(job)
                self._changed.wait(self._at + min(self._left.values()) * self._slowdown - now)

    def run(self, seconds: float, at: float) -> float:
        """Start a job and wait until it is done; returns the moment at which it was."""
        return self.wait(self.begin(seconds, at))

    @property
    def _slowdown(self) -> float:
        jobs = len(self._left)
        return 1.0 if jobs == 1 else jobs * self._interference

    def _advance(self, to: float) -> None:
        """Go on to a moment, ending jobs on the way."""
        while self._left:
            shortest, slowdown = min(self._left.values()), self._slowdown
            end = self._at + shortest * slowdown
            passed = shortest if end <= to else max(to - self._at, 0.0) / slowdown
            self._left = {job: left - passed for job, left in self._left.items()}
            if end > to:
                self._at = max(self._at, to)
                return
            self._at = end
            done = [job for job, left in self._left.items() if left <= 1e-9]
            for job in done:
                del self._left[job]
                self._ended[job] = end
            self._changed.notify_all()


class RankClock:
    """The time of one actor on its emulated devices.

    busy_s, host_s: seconds that its devices computed for it, and that it took itself between their jobs.
    """

    def __init__(self, devices: list[EmulatedDevice], time_scale: float) -> None:
        self._devices, self._time_scale = devices, time_scale
        self._late_s = 0.0
        self._at: float | None = None
        self._idle_s = 0.0
        self.busy_s = self.host_s = 0.0

    def now(self) -> float:
        """Return the moment of the next job: now, less what the last wake-up was late."""
        now = time.monotonic() - self._late_s
        if self._at is not None:
            self.host_s += max(now - self._at - self._idle_s, 0.0)
            now = max(now, self._at)
        self._at, self._idle_s = now, 0.0
        return now

    def compute(self, seconds: float, at: float) -> float:
        """Be busy for ``seconds`` times the scale from ``at`` on; returns the end."""
        scaled = seconds * self._time_scale
        jobs = [(device, device.begin(scaled, at)) for device in self._devices]
        end = max(device.wait(job) for device, job in jobs)
        self.busy_s += scaled
        self._passed(end)
        return end

    def scaled(self, seconds: float) -> float:
        """Return seconds of a device in seconds here."""
        return seconds * self._time_scale

    def wait_until(self, at: float) -> None:
        """Wait until a moment."""
        while (left_s := at - time.monotonic()) > 0.0:
            time.sleep(left_s)
        self._passed(at)

    def skip_to(self, at: float) -> None:
        """Go on from a later moment that has already come, such as that of the last rank at a meeting."""
        assert self._at is not None
        self._at = max(self._at, at)

    def idled(self, seconds: float) -> None:
        """Note a wait for something real: it is no work of this actor, and it ended when it did."""
        self._idle_s += seconds
        self._late_s = 0.0

    def _passed(self, at: float) -> None:
        self._late_s = max(time.monotonic() - at, 0.0)
        self._at = at
