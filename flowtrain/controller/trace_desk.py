"""Carries out the requests for traces of a running run, which come through files of its directory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray

from flowtrain.controller.run_traces import RunTraces
from flowtrain.controller.state import Role
from flowtrain.controller.worker_group import WorkerGroup
from flowtrain.flow.api import CoordinatorApi
from flowtrain.observability.diagnostics import Diagnostic
from flowtrain.observability.run_dir import RunDir
from flowtrain.observability.trace_request import (
    TraceAnswer,
    TraceRequest,
    TraceState,
    answer_request,
    take_request,
)
from flowtrain.types.tracing import TraceOrder, TraceSteps

PROFILES_S = 300.0
"""How long actors may take to write their profiles after the last step."""


@dataclass
class _Window:
    """A request that is being carried out."""

    answer: TraceAnswer
    profiles: bool
    """Whether actors write files of their own."""
    orders: list[ray.ObjectRef[Any]] = field(default_factory=list)
    """Each is done when its actor has written its files."""
    ended_s: float | None = None
    """When its last step was done, on the monotonic clock."""


class TraceDesk:
    """Looks for requests whenever ``poll`` is called, and answers them. An error of it never ends the run.

    actors: whose backbone ranks run. num_steps: of the run. note: shows a line to the user.
    """

    def __init__(
        self, files: RunDir, traces: RunTraces, actors: WorkerGroup, num_steps: int, note: Callable[[str], None]
    ) -> None:
        self._files, self._traces, self._actors, self._num_steps, self._note = files, traces, actors, num_steps, note
        self._tracing = Diagnostic("a trace on demand", retries=True)
        self._window: _Window | None = None

    def poll(self) -> None:
        """Take a request, or go on with the one that was taken."""
        self._tracing.attempt(self._poll)

    def close(self) -> None:
        """End the request that is under way, because the run ends."""
        self._tracing.attempt(self._close)

    def _poll(self) -> None:
        request = take_request(self._files)
        if request is not None and self._window is not None:
            last = self._window.answer.last_step
            self._refuse(request, f"another trace is under way, up to step {last}; ask again when it is complete")
        elif request is not None:
            try:
                self._begin(request)
            except Exception as error:
                self._window = None
                self._traces.drop_window()
                self._refuse(request, f"the trace could not be begun: {error}")
                raise
        elif self._window is not None and not self._traces.has_window:
            self._go_on(self._window)

    def _begin(self, request: TraceRequest) -> None:
        steps = self._actors.link.ask(CoordinatorApi.trace, request.steps)
        if steps.first > self._num_steps:
            done = f"the run has begun all of its {self._num_steps} steps"
            self._refuse(request, f"no step is left to trace: {done}; ask earlier, or a longer run")
            return
        steps = TraceSteps(steps.first, min(steps.last, self._num_steps))
        directory = self._traces.open_window(steps)
        where = str(directory.relative_to(self._files.root))
        answer = TraceAnswer(request.id, TraceState.RECORDING, where, steps.first, steps.last)
        self._window = _Window(answer, request.profiler or request.memory)
        order = TraceOrder(steps.last, str(directory), request.profiler, request.memory)
        roles = (Role.BACKBONE, Role.ENCODER) if self._window.profiles else (Role.BACKBONE,)
        for role in roles:
            self._window.orders += [actor.trace.remote(order) for actor in self._actors.of_role(role).values()]
        answer_request(self._files, answer)
        self._note(f"tracing steps {steps.first} to {steps.last}, into {where}")

    def _go_on(self, window: _Window) -> None:
        """Answer once the actors have written their files, after the last step."""
        if window.ended_s is None:
            window.ended_s = time.monotonic()
            if window.profiles:
                for encoder in self._actors.of_role(Role.ENCODER).values():
                    encoder.end_trace.remote()
        done, waiting = ray.wait(window.orders, num_returns=len(window.orders), timeout=0)
        late = time.monotonic() - window.ended_s > PROFILES_S
        if window.profiles and waiting and not late:
            return
        notes = self._faults() + (_notes(done) if window.profiles else [])
        if window.profiles and waiting:
            notes.append(f"{len(waiting)} actors have not written their profiles within {PROFILES_S:g} s")
        self._done(window, window.answer.last_step, notes)

    def _close(self) -> None:
        window = self._window
        if window is None:
            return
        is_whole = not self._traces.has_window
        if not is_whole and self._traces.num_done < window.answer.first_step:
            self._end_without_step(window)
            return
        self._traces.close_window()
        notes = self._faults()
        if not is_whole:
            notes.append(f"the run ended after step {self._traces.num_done}")
        if window.profiles:
            notes += _notes(ray.wait(window.orders, num_returns=len(window.orders), timeout=0)[0])
        self._done(window, window.answer.last_step if is_whole else self._traces.num_done, notes)

    def _end_without_step(self, window: _Window) -> None:
        """Answer a request whose first step was not done; what was recorded of it is kept."""
        self._window = None
        answer, last_step = window.answer, self._traces.num_done
        directory = None if self._traces.drop_window() else answer.directory
        reason = f"the run ended after step {last_step}, before step {answer.first_step} was done"
        answer_request(
            self._files, TraceAnswer(answer.id, TraceState.DONE, directory, answer.first_step, last_step, reason)
        )
        self._note(f"traced no step: {reason}")

    def _faults(self) -> list[str]:
        return ["trace.json is not complete; the log of the run says why"] if self._traces.lacks_something else []

    def _done(self, window: _Window, last_step: int, notes: list[str]) -> None:
        self._window = None
        answer = window.answer
        reason = "; ".join(notes) or None
        done = TraceAnswer(answer.id, TraceState.DONE, answer.directory, answer.first_step, last_step, reason)
        answer_request(self._files, done)
        self._note(f"traced steps {answer.first_step} to {last_step}: {answer.directory}")

    def _refuse(self, request: TraceRequest, reason: str) -> None:
        answer_request(self._files, TraceAnswer(request.id, TraceState.REFUSED, reason=reason))


def _notes(orders: list[ray.ObjectRef[Any]]) -> list[str]:
    """What the actors could not write, and why; a dead actor has written nothing."""
    notes: list[str] = []
    for order in orders:
        try:
            notes += ray.get(order)
        except ray.exceptions.RayError as error:
            notes.append(f"an actor has written no profile: {str(error).splitlines()[0]}")
    return list(dict.fromkeys(notes))
