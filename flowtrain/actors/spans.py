"""Collects an actor's spans until it reports them to the coordinator."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from flowtrain.actors.link import CoordinatorLink
from flowtrain.actors.run_clock import RunClock
from flowtrain.types.messages import Span


class SpanLog:
    """Spans that one actor has not reported yet. Any thread may add one."""

    def __init__(self, actor: str) -> None:
        self._actor = actor
        self._clock = RunClock()
        self._spans: deque[Span] = deque()
        self.is_on = True
        """Whether spans are kept; any thread may read it."""

    def follow(self, link: CoordinatorLink) -> None:
        """Report times on the coordinator's clock from now on."""
        if self._clock.follow(link):
            self._note_offset()

    def now_s(self) -> float:
        """Return the run's clock now."""
        return self._clock.of(time.monotonic())

    def add(
        self,
        name: str,
        start_s: float,
        end_s: float,
        *,
        produces: Sequence[int] = (),
        consumes: Sequence[int] = (),
        **args: int | float | str,
    ) -> None:
        """Add a span, unless the log is off. Times are on this process's monotonic clock; ``args`` go into the trace.

        produces, consumes: as of ``Span``.
        """
        if not self.is_on:
            return
        self._spans.append(Span(self._actor, name, start_s, end_s, args, tuple(produces), tuple(consumes)))

    def take(self) -> tuple[Span, ...]:
        """Return the spans added since the last call, each once, with times on the run's clock."""
        if self._clock.refresh():
            self._note_offset()
        taken = [self._spans.popleft() for _ in range(len(self._spans))]
        return tuple([self._reported(span) for span in taken])

    def _note_offset(self) -> None:
        now_s, clock = time.monotonic(), self._clock
        self.add("clock_offset", now_s, now_s, offset_s=clock.offset_s, error_s=clock.error_s)

    def _reported(self, span: Span) -> Span:
        at = self._clock.of
        return Span(span.actor, span.name, at(span.start_s), at(span.end_s), span.args, span.produces, span.consumes)
