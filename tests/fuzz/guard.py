"""Ends a test case that hangs in Python code; one that hangs in C is ended by pytest's own limit."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


class Hung(BaseException):
    """No ``except Exception`` catches it."""


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raise Hung in the main thread after so many seconds."""

    def ring(number: int, frame: object) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
