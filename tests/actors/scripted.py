"""A coordinator that answers from a script, for one producer under test."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from flowtrain.actors.link import CoordinatorLink
from flowtrain.actors.pooling import address_space
from flowtrain.config.run import RunConfig
from flowtrain.flow.api import CoordinatorApi
from flowtrain.mempool.pool import Pool
from flowtrain.observability.clocks import monotonic_clock_name
from flowtrain.types.memory import SegmentExport
from flowtrain.types.messages import Joined
from flowtrain.types.tracing import ClockReading

INDEX, FEEDER = 0, 2


class ScriptedLink(CoordinatorLink):
    """Answers every call of a method with the next thing in its script: a value, an exception, or a function of the
    call's arguments. ``said[method]`` has the arguments of its calls."""

    def __init__(self, joined: Joined | None = None) -> None:
        self._scripts: dict[str, deque[Any]] = {}
        self._joined = joined or Joined(INDEX)
        self.said: dict[str, list[tuple[Any, ...]]] = {}
        self.export: SegmentExport | None = None
        self.others: list[SegmentExport] = []

    def answers(self, method: str, *answers: Any) -> None:
        """Write the script of a method."""
        self._scripts[method] = deque(answers)

    @property
    def node_id(self) -> str:
        return "node-0"

    def ask(self, question: Callable[..., Any], *args: Any) -> Any:
        method = question.__name__
        self.said.setdefault(method, []).append(args)
        if method == "join":
            return self._joined
        if method == "publish":
            self.export = args[0]
            return None
        if method == "clock":
            return ClockReading(monotonic_clock_name(), time.monotonic(), 0.0)
        if method == "exports":
            return (*self.others, *(() if self.export is None else (self.export,)))
        answer = self._scripts[method].popleft()
        if isinstance(answer, BaseException):
            raise answer
        return answer(*args) if callable(answer) else answer


def reader_of(config: RunConfig, link: ScriptedLink, run_id: str) -> Pool:
    """Return a second process's pool, which reads what the producer has put."""
    return Pool(
        process_index=INDEX + 1,
        node_id="node-0",
        run_id=run_id,
        address_space=address_space(config.pool),
        segment_nbytes=0,
        alignment=config.pool.alignment,
        knob="knob",
        fetch_exports=lambda: link.ask(CoordinatorApi.exports),
        processes_per_node=config.pool.processes_per_node,
    )


def feeder_of(config: RunConfig, run_id: str, segment_nbytes: int) -> Pool:
    """Return a feeder's pool, into which a test puts images."""
    return Pool(
        process_index=FEEDER,
        node_id="node-0",
        run_id=run_id,
        address_space=address_space(config.pool),
        segment_nbytes=segment_nbytes,
        alignment=config.pool.alignment,
        knob="knob",
        fetch_exports=lambda: [],
        processes_per_node=config.pool.processes_per_node,
    )


def new_run_id() -> str:
    """Return a new run id, so that no two pools of a process share a name."""
    return f"test-{secrets.token_hex(4)}"
