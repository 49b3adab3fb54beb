"""Waiting without polling: a signal that wakes whoever waits for a change, always with a timeout."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Signal:
    """Wakes its waiters when something that they wait for may have changed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake everybody who waits now."""
        self._event.set()
        self._event = asyncio.Event()

    async def until(self, attempt: Callable[[], T | None], timeout_s: float) -> T | None:
        """Return the first result of ``attempt`` that is not None, trying again at every signal; None after a timeout.

        Attempts run on the event loop, so no signal can fall between an attempt and the wait after it.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    result = attempt()
                    if result is not None:
                        return result
                    await self._event.wait()
        except TimeoutError:
            return None
