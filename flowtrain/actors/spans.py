"""Collects an actor's spans until it reports them to the coordinator."""

from __future__ import annotations

from collections import deque

from flowtrain.types.messages import Span


class SpanLog:
    """Spans that one actor has not reported yet. Any thread may add one."""

    def __init__(self, actor: str) -> None:
        self._actor = actor
        self._spans: deque[Span] = deque()

    def add(self, name: str, start_s: float, end_s: float, **args: int | float | str) -> None:
        """Add a span. Times are seconds since the Unix epoch; ``args`` go into the trace."""
        self._spans.append(Span(self._actor, name, start_s, end_s, args))

    def take(self) -> tuple[Span, ...]:
        """Return the spans added since the last call, each once."""
        return tuple(self._spans.popleft() for _ in range(len(self._spans)))
