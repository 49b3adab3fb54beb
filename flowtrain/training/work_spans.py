"""Spans of a device's work, without ever waiting for the device."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from typing import Any, Protocol

import torch


class SpanRecorder(Protocol):
    """Takes a timed stretch of work; times are on this process's monotonic clock."""

    def __call__(
        self,
        name: str,
        start_s: float,
        end_s: float,
        *,
        produces: Sequence[int] = (),
        consumes: Sequence[int] = (),
        **args: int | float | str,
    ) -> None:
        """Record one span; ``args`` go into the trace. produces, consumes: as of ``Span``."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """An event on the device, and when the host recorded it: the device reaches it then or later."""

    event: torch.Event
    host_s: float


@dataclass(frozen=True, slots=True)
class _Open:
    """A span whose times are still on the device."""

    name: str
    start: _Mark
    end: _Mark
    produces: Sequence[int]
    consumes: Sequence[int]
    args: dict[str, int | float | str]


class WorkSpans:
    """Times work on a device and hands it to ``record``.

    On a CPU a span has the host's times. On an accelerator the host only launches the work, so a span has the device's
    times: its two ends are events on the current stream, and ``collect`` reads those that the device has passed. What
    turns the device's times into the host's is bounded from two sides. The device reaches an event after the host has
    recorded it, and before the host sees that it has. Both are close wherever the host waits for the device, and
    ``caught_up`` is for such a place; the code waits there for reasons of its own, never for a span's.

    Use it from one thread.

    record: None if there are no spans.
    is_on: whether spans are timed; those that were begun are still collected.
    """

    def __init__(self, device: torch.device, record: SpanRecorder | None) -> None:
        self._device = device
        self._record: SpanRecorder = record if record is not None else _nowhere
        self._open: list[_Open] = []
        self._idle: list[_Mark] = []  # recorded when the device had nothing to do
        self._seen: list[tuple[torch.Event, float]] = []  # events, and when the host saw that the device had passed
        self.is_on = record is not None

    @contextmanager
    def span(
        self, name: str, *, produces: Sequence[int] = (), consumes: Sequence[int] = (), **args: int | float | str
    ) -> Iterator[None]:
        """Time the work that the block launches; nothing is recorded if it raises."""
        if not self.is_on:
            yield
            return
        if self._device.type == "cpu":
            start_s = time.monotonic()
            yield
            self._record(name, start_s, time.monotonic(), produces=produces, consumes=consumes, **args)
            return
        start = self._mark()
        yield
        self._open.append(_Open(name, start, self._mark(), produces, consumes, args))

    def add(self, name: str, start_s: float, end_s: float, **args: Any) -> None:
        """Record a span whose times are known, on this process's monotonic clock."""
        if self.is_on:
            self._record(name, start_s, end_s, **args)

    def caught_up(self) -> None:
        """Compare both clocks; call it where the host has just waited for the device."""
        if self._open and (last := self._open[-1].end.event).query():
            self._seen.append((last, time.monotonic()))
            self._idle.append(self._mark())

    def collect(self) -> None:
        """Hand over the spans that the device has passed; the others wait for a later call."""
        are_done = [each.end.event.query() for each in self._open]
        done = list(compress(self._open, are_done))
        if not done:
            return
        self._seen.append((done[-1].end.event, time.monotonic()))
        first = done[0].start.event
        marks = [mark for each in done for mark in (each.start, each.end)]
        marks += [mark for mark in self._idle if mark.event.query()]
        after_s = [mark.host_s - _elapsed_s(first, mark.event) for mark in marks]
        before_s = [at_s - _elapsed_s(first, event) for event, at_s in self._seen]
        zero_s = (max(after_s) + min(before_s)) / 2
        for each in done:
            start_s, end_s = (zero_s + _elapsed_s(first, mark.event) for mark in (each.start, each.end))
            self._record(each.name, start_s, end_s, produces=each.produces, consumes=each.consumes, **each.args)
        self._open = [each for each, is_done in zip(self._open, are_done, strict=True) if not is_done]
        self._idle.clear()
        self._seen.clear()

    def _mark(self) -> _Mark:
        event = torch.Event(self._device, enable_timing=True)
        host_s = time.monotonic()
        event.record()
        return _Mark(event, host_s)


def _elapsed_s(first: torch.Event, event: torch.Event) -> float:
    return 0.0 if event is first else first.elapsed_time(event) / 1000.0


def _nowhere(name: str, start_s: float, end_s: float, **args: object) -> None:
    """Take a span that nobody wants."""
