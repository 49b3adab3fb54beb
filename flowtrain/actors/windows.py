"""Which steps an actor traces: the first ones of the run, and those that somebody asks for while it runs."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue

import torch

from flowtrain.actors.profiles import Profiles
from flowtrain.types.tracing import TraceOrder

Ended = Future[tuple[str, ...]]
"""Done when a window has ended and its files are written; what could not be written, and why."""


class Windows:
    """The traced steps of one actor. ``ask`` and ``end_now`` are for any thread, the rest for the one that computes.

    name: of the actor. last_step: spans are recorded until it is done.
    """

    def __init__(self, name: str, last_step: int = 0) -> None:
        self._name = name
        self.last_step = last_step
        self._orders: SimpleQueue[tuple[TraceOrder, Ended] | None] = SimpleQueue()
        self._open: tuple[TraceOrder, Ended, Profiles] | None = None

    def ask(self, order: TraceOrder) -> Ended:
        """Trace as the order says, from the next ``begin`` on."""
        ended: Ended = Future()
        self._orders.put((order, ended))
        return ended

    def end_now(self) -> None:
        """End profiles at the next ``begin``, for an actor that knows no steps."""
        self._orders.put(None)

    def begin(self, device: torch.device, step: int = 0) -> bool:
        """Call before each piece of work, with its step if that is known; returns whether its spans are recorded."""
        with suppress(Empty):
            while True:
                asked = self._orders.get_nowait()
                self.close()
                if asked is not None:
                    self._start(*asked, device, step)
        return step <= self.last_step

    def end(self, step: int) -> None:
        """Call after each step: profiles end with the last one of their window."""
        if self._open is not None and step >= self._open[0].last_step:
            self.close()

    def close(self) -> None:
        """Write the profiles that are open."""
        if self._open is not None:
            _, ended, profiles = self._open
            self._open = None
            profiles.write()
            ended.set_result(tuple(profiles.notes))

    def _start(self, order: TraceOrder, ended: Ended, device: torch.device, step: int) -> None:
        if order.last_step < step:
            ended.set_result((f"{self._name} was past step {order.last_step} when it was asked",))
            return
        self.last_step = max(self.last_step, order.last_step)
        if order.profiler or order.memory:
            self._open = order, ended, Profiles(order, self._name, device)
        else:
            ended.set_result(())
