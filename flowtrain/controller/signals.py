"""SIGINT and SIGTERM ask a run for a clean end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest(threading.Event):
    """Set when the user, or a scheduler, asks for a clean end."""

    terminated_s: float | None = None
    """When SIGTERM came first, on the monotonic clock: whoever sends it may not wait for ever. None: it did not."""
    to_grow = False
    """The run has room for all its devices again, and ends after a checkpoint only to go on with them."""

    @property
    def ends_to_grow(self) -> bool:
        """Whether this is why it ends, and nobody asked for an end."""
        return self.to_grow and not self.is_set()


@contextmanager
def stop_on_signals(stop: StopRequest) -> Iterator[None]:
    """SIGINT and SIGTERM ask for a clean end; a second one ends at once. Only the main thread can take signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        if number == signal.SIGTERM:
            stop.terminated_s = time.monotonic()
        stop.set()  # nothing else: the interrupted thread may be printing

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
