"""``trace.json``: spans of all actors in Chrome trace format, one process row per actor, for Perfetto or Chrome."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from flowtrain.observability.files import open_private, write_at
from flowtrain.types.messages import Span

_HEAD = b'{"displayTimeUnit": "ms", "traceEvents": [\n'
_TAIL = b"\n]}\n"
_SIDE_WORK = frozenset({"decode", "fetch"})
"""Work of an actor's side threads; it overlaps with the actor's other spans, so it has separate lanes."""


class TraceWriter:
    """Streams spans into a trace that is valid JSON after every ``write``, so a killed run leaves a readable trace.

    An actor is a process (``pid``) of the trace; its spans are on lanes (``tid``). Overlapping spans are on different
    lanes unless they nest, because viewers drop spans that overlap on one lane without nesting.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.fdopen(open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb", buffering=0)
        self._pids: dict[str, int] = {}
        self._lanes: dict[tuple[str, str], list[_Lane]] = {}
        self._num_lanes: dict[str, int] = {}
        self._num_events = 0
        self._end = len(_HEAD)
        write_at(self._file.fileno(), _HEAD + _TAIL, 0)

    def write(self, spans: Iterable[Span]) -> None:
        """Append spans of any actors, in any order. After an OSError the trace ends with the spans before."""
        events: list[dict[str, Any]] = []
        for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
            events.extend(self._events(span))
        if not events:
            return
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

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()

    def _events(self, span: Span) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        pid = self._pids.get(span.actor)
        if pid is None:
            pid = self._pids[span.actor] = len(self._pids) + 1
            events.append(_metadata("process_name", pid, 0, span.actor))
        lane, is_new = self._lane(span)
        if is_new:
            events.append(_metadata("thread_name", pid, lane.tid, lane.name))
        events.append(
            {
                "name": span.name,
                "cat": "flowtrain",
                "ph": "X",
                "ts": round(span.start_s * 1e6, 1),
                "dur": round(max(span.end_s - span.start_s, 0.0) * 1e6, 1),
                "pid": pid,
                "tid": lane.tid,
                "args": span.args,
            }
        )
        return events

    def _lane(self, span: Span) -> tuple[_Lane, bool]:
        kind = span.name if span.name in _SIDE_WORK else ""
        lanes = self._lanes.setdefault((span.actor, kind), [])
        for lane in lanes:
            if lane.takes(span):
                return lane, False
        tid = self._num_lanes[span.actor] = self._num_lanes.get(span.actor, 0) + 1
        lane = _Lane(tid, f"{span.actor} {kind}".strip(), span)
        lanes.append(lane)
        return lane, True


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


def read_spans(path: Path) -> list[Span]:
    """Spans of a ``trace.json``; times are seconds since the Unix epoch."""
    events = json.loads(path.read_bytes())["traceEvents"]
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


def _metadata(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
