"""An asynchronous actor on an event loop of its own thread, as Ray runs it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

LIMIT_S = 60.0
A = TypeVar("A")


class Elsewhere(Generic[A]):
    """A context; at its end the loop ends, and with it every connection."""

    def __init__(self, actor: A) -> None:
        self.actor = actor
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Elsewhere[A]:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT_S)
        self._loop.close()

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(LIMIT_S)

    def end(self) -> None:
        """End all that runs on the loop."""
        self.call(self._end())

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0.05)  # transports close in a later round of the loop
