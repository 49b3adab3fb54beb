"""``trace.json``: what all actors did when, in Chrome's trace format, for Perfetto or Chrome.

The format is Google's "Trace Event Format". Of its events the trace has complete ones (``X``), counters (``C``), flows
(``s`` and ``f``) and names (``M``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowtrain.observability.files import open_private, write_at
from flowtrain.types.messages import Span
from flowtrain.types.tracing import Counter

_HEAD = b'{"displayTimeUnit": "ms", "traceEvents": [\n'
_TAIL = b"\n]}\n"
_SIDE_WORK = frozenset({"decode", "fetch", "restart"})
"""Work of an actor's side threads, or beside it; it overlaps with the actor's other spans, so it has separate lanes."""
_CATEGORY, _ARROW = "flowtrain", "features"


class TraceWriter:
    """Streams spans and counters into a trace that is valid JSON after every ``write``, so also after a kill.

    An actor is a process (``pid``) of the trace; its spans are on lanes (``tid``). Overlapping spans are on different
    lanes unless they nest, because viewers drop spans that overlap on one lane without nesting. No two lanes of the
    trace have one number, because Perfetto names threads by it alone.

    An arrow leads from a span to each one that consumes what it produced. Both ends are written with the second span,
    so no arrow lacks one.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.fdopen(open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb", buffering=0)
        self._pids: dict[str, int] = {}
        self._lanes: dict[tuple[str, str], list[_Lane]] = {}
        self._num_lanes = 0
        self._producers: dict[int, _End] = {}
        self._num_arrows = 0
        self._num_events = 0
        self._end = len(_HEAD)
        write_at(self._file.fileno(), _HEAD + _TAIL, 0)

    def write(self, spans: Iterable[Span], counters: Iterable[Counter] = ()) -> None:
        """Append spans and counters of any actors, in any order. After an OSError the trace ends with those before."""
        events: list[dict[str, Any]] = []
        consumers: list[tuple[_End, tuple[int, ...]]] = []
        for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
            end = self._add(span, events)
            self._producers.update(dict.fromkeys(span.produces, end))
            if span.consumes:
                consumers.append((end, span.consumes))
        for end, positions in consumers:  # after all spans, since a viewer binds an arrow to a span that it has read
            events.extend(self._arrows(end, positions))
        for counter in counters:
            events.append(_event("C", counter.name, self._pid(counter.actor, events), counter.time_s, counter.values))
        if events:
            self._append(events)

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()

    def _append(self, events: list[dict[str, Any]]) -> None:
        separator = b",\n" if self._num_events else b""
        body = separator + ",\n".join(json.dumps(event) for event in events).encode()
        try:
            write_at(self._file.fileno(), body + _TAIL, self._end)
        except OSError:
            with suppress(OSError):  # this takes no more room on the disk
                write_at(self._file.fileno(), _TAIL, self._end)
                self._file.truncate(self._end + len(_TAIL))
            raise
        self._num_events += len(events)
        self._end += len(body)

    def _add(self, span: Span, events: list[dict[str, Any]]) -> _End:
        pid = self._pid(span.actor, events)
        lane, is_new = self._lane(span)
        if is_new:
            events.append(_named("thread_name", pid, lane.tid, lane.name))
        event = _event("X", span.name, pid, span.start_s, span.args)
        events.append(event | {"dur": round(max(span.end_s - span.start_s, 0.0) * 1e6, 1), "tid": lane.tid})
        return _End(pid, lane.tid, span.start_s)

    def _arrows(self, end: _End, positions: Iterable[int]) -> Iterator[dict[str, Any]]:
        """Arrows to a span from those that produced the positions; a position leads to one span."""
        found = [self._producers.pop(position) for position in positions if position in self._producers]
        for start in dict.fromkeys(found):
            self._num_arrows += 1
            for kind, each in (("s", start), ("f", end)):
                event = _event(kind, _ARROW, each.pid, each.start_s) | {"tid": each.tid, "id": self._num_arrows}
                yield event | ({"bp": "e"} if kind == "f" else {})  # it ends at the span around it, not at the next

    def _pid(self, actor: str, events: list[dict[str, Any]]) -> int:
        pid = self._pids.get(actor)
        if pid is None:
            pid = self._pids[actor] = len(self._pids) + 1
            events.append(_named("process_name", pid, 0, actor))
        return pid

    def _lane(self, span: Span) -> tuple[_Lane, bool]:
        kind = span.name if span.name in _SIDE_WORK else ""
        lanes = self._lanes.setdefault((span.actor, kind), [])
        for lane in lanes:
            if lane.takes(span):
                return lane, False
        self._num_lanes += 1
        lane = _Lane(self._num_lanes, f"{span.actor} {kind}".strip(), span)
        lanes.append(lane)
        return lane, True


@dataclass(frozen=True, slots=True)
class _End:
    """Where an arrow starts or ends: the start of a span on its lane."""

    pid: int
    tid: int
    start_s: float


class _Lane:
    """One row of spans, in order of their starts; each span starts after an earlier one ends, or lies within it."""

    def __init__(self, tid: int, name: str, span: Span) -> None:
        self.tid = tid
        self.name = name
        self._last_start_s = span.start_s
        self._open_ends_s = [span.end_s]

    def takes(self, span: Span) -> bool:
        if span.start_s < self._last_start_s:
            return False  # the span came late: spans that ended in the meantime might overlap it
        still_open = [end_s for end_s in self._open_ends_s if end_s > span.start_s]
        if still_open and span.end_s > still_open[-1]:
            return False
        self._last_start_s = span.start_s
        self._open_ends_s = [*still_open, span.end_s]
        return True


def read_events(path: Path) -> list[dict[str, Any]]:
    """Events of a ``trace.json`` as they are in the file.

    A kill in the middle of a write can leave the file torn; then it returns the events before the torn one.
    """
    data = path.read_bytes()
    with suppress(ValueError):
        found: list[dict[str, Any]] = json.loads(data)["traceEvents"]
        return found
    events: list[dict[str, Any]] = []
    decoder = json.JSONDecoder()
    for line in data.decode(errors="replace").split("\n")[1:]:  # each event has its own line
        try:
            events.append(decoder.raw_decode(line)[0])
        except ValueError:
            break
    return events


def read_spans(path: Path) -> list[Span]:
    """Spans of a ``trace.json``; times are seconds since the Unix epoch. It has no positions, only their arrows."""
    events = read_events(path)
    actors = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    return [
        Span(
            actor=actors[event["pid"]],
            name=event["name"],
            start_s=event["ts"] / 1e6,
            end_s=(event["ts"] + event["dur"]) / 1e6,
            args=event["args"],
        )
        for event in events
        if event["ph"] == "X"
    ]


def _event(kind: str, name: str, pid: int, time_s: float, args: dict[str, Any] | None = None) -> dict[str, Any]:
    event = {"name": name, "cat": _CATEGORY, "ph": kind, "ts": round(time_s * 1e6, 1), "pid": pid}
    return event if args is None else event | {"args": args}


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
