"""Spans on their way to the coordinator: several threads note them, one hands them over."""

from __future__ import annotations

from collections import deque

from flowtrain.types.messages import Span


class SpanLog:
    """What one actor did and has not reported yet. Any thread may add."""

    def __init__(self, actor: str) -> None:
        self._actor = actor
        self._spans: deque[Span] = deque()

    def add(self, name: str, start_s: float, end_s: float, **args: int | float | str) -> None:
        """Note a span; times are seconds since the Unix epoch, ``args`` go into the trace."""
        self._spans.append(Span(self._actor, name, start_s, end_s, args))

    def take(self) -> tuple[Span, ...]:
        """Hand over what was noted since the last call, each span once."""
        return tuple(self._spans.popleft() for _ in range(len(self._spans)))
