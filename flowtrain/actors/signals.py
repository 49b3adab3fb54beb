"""A signal for waits on an event loop: waiters wake at each change, and every wait has a timeout."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Signal:
    """Wakes its waiters when their condition may have changed."""

    def __init__(self) -> None:
        self._event: asyncio.Event | None = None

    def notify(self) -> None:
        """Wake all current waiters."""
        if self._event is not None:
            self._event.set()
            self._event = None

    async def until(self, attempt: Callable[[], T | None], timeout_s: float) -> T | None:
        """Return the first result of ``attempt`` that is not None, or None after the timeout. Tries at each signal.

        Attempts run on the event loop, so no signal is lost between an attempt and the wait after it.
        """
        result = attempt()
        if result is not None:  # the usual case, which needs no timer
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
