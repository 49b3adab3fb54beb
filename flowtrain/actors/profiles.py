"""torch's profiler and the allocator's history over a few steps of one actor."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flowtrain.types.tracing import TraceOrder

logger = logging.getLogger(__name__)

MAX_ALLOCATIONS = 100_000
"""Events that the allocator's history keeps, of several KB each; older ones are dropped."""


class Profiles:
    """What an order asks for besides spans: begun when constructed, ended by ``write``, in the thread that computes.

    Files go into the order's directory, named by the actor. What fails is noted, and training goes on.
    """

    def __init__(self, order: TraceOrder, name: str, device: torch.device) -> None:
        self._ends: list[tuple[str, Callable[[], None]]] = []
        self.notes: list[str] = []
        """What could not be written, and why."""
        profiler, memory = (Path(order.directory) / each for each in (f"profiler-{name}.json", f"memory-{name}.pickle"))
        if order.memory:
            self._attempt(memory.name, lambda: self._start_history(memory, device))
        if order.profiler:
            self._attempt(profiler.name, lambda: self._start_profiler(profiler))

    def write(self) -> None:
        """End what was begun, and write the files."""
        for name, end in reversed(self._ends):
            self._attempt(name, end)
        self._ends.clear()

    def _attempt(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever it is, training is worth more
            self.notes.append(f"{name} could not be written: {error}")
            logger.warning("%s", self.notes[-1])

    def _start_profiler(self, path: Path) -> None:
        profile = torch.profiler.profile(record_shapes=True)
        profile.start()

        def end() -> None:
            profile.stop()
            profile.export_chrome_trace(str(path))
            if not _is_whole(path):  # torch only logs that it could not write
                raise OSError(f"{path} is missing or incomplete; its disk may be full")

        self._ends.append((path.name, end))

    def _start_history(self, path: Path, device: torch.device) -> None:
        memory: Any = getattr(torch.get_device_module(device), "memory", None)
        if not hasattr(memory, "_record_memory_history"):
            raise NotImplementedError(f"torch keeps no history of allocations on the device {device.type!r}")
        memory._record_memory_history(max_entries=MAX_ALLOCATIONS)

        def end() -> None:
            try:
                memory._dump_snapshot(str(path))
            finally:
                memory._record_memory_history(enabled=None)

        self._ends.append((path.name, end))


def _is_whole(path: Path) -> bool:
    """Whether a JSON object was written to its end."""
    if not path.is_file() or path.stat().st_size < 2:
        return False
    with path.open("rb") as file:
        file.seek(-2, 2)
        return file.read().strip().endswith(b"}")
