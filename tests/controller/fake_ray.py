"""Ray without Ray: references that a test completes, behind ``ray.wait`` and ``ray.get``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from flowtrain.controller.state import Role
from flowtrain.flow.api import CoordinatorApi
from flowtrain.types.events import Event

MAX_IDLE = 50
"""Waits that bring nothing before a test counts as hung."""


class Ref:
    """What a call returns: open until ``finish`` gives it a value or an exception."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.is_done = False
        self.value: Any = None

    def finish(self, value: Any = None) -> None:
        self.is_done, self.value = True, value


class FakeRay:
    """Plays a script: whenever nothing is done, the next action happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *script: Callable[[], object]) -> None:
        self.script = list(script)
        self._idle = 0
        monkeypatch.setattr(ray, "wait", self.wait)
        monkeypatch.setattr(ray, "get", self.get)

    def wait(self, refs: Sequence[Ref], num_returns: int = 1, timeout: float | None = None) -> Any:
        assert timeout is not None, "every wait has a timeout"
        done = [ref for ref in refs if ref.is_done]
        if not done and self.script:
            self.script.pop(0)()
            done = [ref for ref in refs if ref.is_done]
        self._idle = 0 if done else self._idle + 1
        assert self._idle < MAX_IDLE, f"everybody waits for {[ref.what for ref in refs]}"
        return done, [ref for ref in refs if ref not in done]

    def get(self, ref: Any, timeout: float | None = None) -> Any:
        if isinstance(ref, list):
            return [self.get(each, timeout) for each in ref]
        if not ref.is_done:
            raise ray.exceptions.GetTimeoutError(ref.what)
        if isinstance(ref.value, BaseException):
            raise ref.value
        return ref.value


class FakeWorkerGroup:
    """What the watcher uses of a workers; ``log`` has what it did, in order."""

    def __init__(self, roles: dict[str, Role], leaders: dict[str, str] | None = None) -> None:
        self.roles = roles
        self.leaders = leaders or {}
        self.log: list[str] = []
        self.runs: dict[Any, str] = {}
        self.pending: list[Event] = []
        self.events_error: BaseException | None = None
        self._open: Ref | None = None
        self._ended = self._wanted = False
        self.link = SimpleNamespace(ask=self._ask, start=self._start)
        for name in roles:
            self.runs[Ref(name)] = name

    def give_up(self, name: str) -> None:
        self.log.append(f"give_up {name}")

    def replace(self, name: str) -> None:
        self.log.append(f"replace {name}")
        members = [name, *(rank for rank, leader in self.leaders.items() if leader == name)]
        self.runs = {ref: other for ref, other in self.runs.items() if other not in members}
        self.runs |= {Ref(member): member for member in members}

    def finish(self, name: str, value: Any = None) -> None:
        """End an actor's loop."""
        next(ref for ref, other in self.runs.items() if other == name and not ref.is_done).finish(value)

    def report(self, *events: Event) -> None:
        """The coordinator has events."""
        self.pending += events
        self._answer()

    def lose_coordinator(self, error: BaseException) -> None:
        self.events_error = error
        self._answer()

    def _ask(self, question: Callable[..., Any], *args: object, **kwargs: object) -> None:
        said = (question.__name__, *args, *(f"{name}={value}" for name, value in kwargs.items()))
        self.log.append(" ".join(map(str, said)))
        if question is CoordinatorApi.flush_events:
            self._wanted = True
            self._answer()

    def _start(self, question: Callable[..., Any]) -> Ref | None:
        return {"events": self._events, "end_events": self._end_events}[question.__name__]()

    def _events(self) -> Ref:
        self._open = Ref("events")
        self._answer()
        return self._open

    def _end_events(self) -> None:
        self._ended = True
        self._answer()

    def _answer(self) -> None:
        if self._open is None or self._open.is_done:
            return
        if self.events_error is not None:
            self._open.finish(self.events_error)
        elif self.pending or self._ended or self._wanted:
            self._wanted = False
            self._open.finish(tuple(self.pending))
            self.pending.clear()


def task_error(cause: BaseException) -> ray.exceptions.RayTaskError:
    """What ``ray.get`` raises where a call raised ``cause``."""
    error = ray.exceptions.RayTaskError("run", "remote traceback", cause, proctitle="x", pid=1, ip="127.0.0.1")
    return error.as_instanceof_cause()


def died(reason: str = "Worker exits with SIGKILL.") -> ray.exceptions.RayActorError:
    """What ``ray.get`` raises where the actor's process is gone."""
    message = f"The actor died unexpectedly before finishing this task.\n\tclass_name: Encoder\n\tpid: 12\n{reason}"
    return ray.exceptions.RayActorError("00", message)


def not_constructed(cause: BaseException) -> ray.exceptions.RayActorError:
    """What ``ray.get`` raises where the actor's ``__init__`` raised."""
    text = f"ray::Encoder.__init__() (pid=12, ip=127.0.0.1)\n  File x\n{type(cause).__name__}: {cause}"
    error = ray.exceptions.RayTaskError("__init__", text, cause, proctitle="x", pid=1, ip="127.0.0.1")
    return ray.exceptions.ActorDiedError(error)
