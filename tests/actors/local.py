"""A coordinator on an event loop in its own thread, and links to it. Actor classes run as threads, without Ray."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from flowtrain.actors.coordinator import Coordinator
from flowtrain.actors.link import CoordinatorLink, P, Question, R
from flowtrain.flow.flow import Flow

LIMIT_S = 60.0
"""No single call of a test takes this long unless it hangs."""


class LocalLink(CoordinatorLink):
    """Calls a coordinator on another thread's event loop."""

    def __init__(self, coordinator: Coordinator, loop: asyncio.AbstractEventLoop) -> None:
        self._coordinator = coordinator
        self._loop = loop

    @property
    def node_id(self) -> str:
        return "node-0"

    def ask(self, question: Question[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        coroutine: Coroutine[Any, Any, R] = getattr(self._coordinator, question.__name__)(*args, **kwargs)
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(LIMIT_S)


@contextmanager
def local_coordinator(make_flow: Callable[[], Flow], poll_s: float = 0.2) -> Iterator[LocalLink]:
    """Run a coordinator during the block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="coordinator", daemon=True)
    thread.start()
    try:
        yield LocalLink(Coordinator(make_flow, poll_s), loop)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(LIMIT_S)
        loop.close()


class Background:
    """A function that runs in a thread. ``join`` returns its result, or raises its error."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(function, *args), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[..., Any], *args: Any) -> None:
        try:
            self._result = function(*args)
        except BaseException as error:
            self._error = error

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> Any:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), "it hangs"
        if self._error is not None:
            raise self._error
        return self._result
