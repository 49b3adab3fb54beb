"""Waiting without polling: a signal that wakes whoever waits for a change, always with a timeout."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Signal:
    """Wakes its waiters when something that they wait for may have changed."""

    def __init__(self) -> None:
        self._event: asyncio.Event | None = None

    def notify(self) -> None:
        """Wake everybody who waits now."""
        if self._event is not None:
            self._event.set()
            self._event = None

    async def until(self, attempt: Callable[[], T | None], timeout_s: float) -> T | None:
        """Return the first result of ``attempt`` that is not None, trying again at every signal; None after a timeout.

        Attempts run on the event loop, so no signal can fall between an attempt and the wait after it.
        """
        result = attempt()
        if result is not None:  # most of the time, and then no timer is needed
            return result
        try:
            async with asyncio.timeout(timeout_s):
                while result is None:
                    if self._event is None:
                        self._event = asyncio.Event()
                    await self._event.wait()
                    result = attempt()
        except TimeoutError:
            return None
        return result
