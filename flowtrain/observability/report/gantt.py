"""Chosen steps of ``trace.json``: who did what, in lanes."""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowtrain.observability.report.reading import Notes, as_number, as_text
from flowtrain.observability.report.steps import Steps

MAX_TRACE_NBYTES = 64 << 20
"""Of a larger one a page has no timeline: reading it takes ten times as much memory, in the driver of a run."""
MAX_ACTORS = 24
MAX_BARS = 4000
DEFAULT_STEPS = 3
_SLACK_S = 0.05
"""A step is written down so much after its end, at least."""
_ROLES = ("feeder", "coordinator", "encoder", "backbone")


@dataclass(frozen=True, slots=True)
class Work:
    """A piece of an actor's work."""

    actor: str
    lane: str
    """The name of its row; rows of one actor may share a name."""
    lane_id: str
    """What tells its row from the actor's others."""
    name: str
    start_s: float
    end_s: float
    args: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Bar:
    """A piece of work in a picture, or several short ones in a row."""

    name: str
    start_s: float
    """From the start of the picture."""
    end_s: float
    count: int
    text: str


@dataclass(frozen=True, slots=True)
class Row:
    """A lane of the picture."""

    actor: str
    label: str
    """Empty for an actor's further lanes."""
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Gantt:
    """Some steps in a row."""

    first_step: int
    last_step: int
    duration_s: float
    ends_s: tuple[tuple[int, float], ...]
    """(step, its end from the start of the picture)."""
    rows: tuple[Row, ...]
    num_left_out: int
    """Actors that are not shown."""


def read_trace(path: Path, notes: Notes, name: str = "trace.json") -> list[Work]:
    """Return the timed work of a trace; of a file that is cut, what can be read. There is none without a file.

    name: of the file, in notes.
    """
    try:
        if is_too_large(path):
            nbytes = path.stat().st_size
            notes.add(f"{name} has {nbytes >> 20:,} MiB, too much for a page; open it at ui.perfetto.dev")
            return []
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        notes.add(f"{name} cannot be read: {error.strerror}")
        return []
    return list(_work(_events(data, name, notes)))


def is_too_large(path: Path) -> bool:
    """Whether a page leaves a trace out."""
    return path.stat().st_size > MAX_TRACE_NBYTES


def _events(data: bytes, name: str, notes: Notes) -> Iterator[Mapping[str, Any]]:
    try:
        whole = json.loads(data)
        found = whole.get("traceEvents") if isinstance(whole, dict) else whole
        yield from (event for event in found or () if isinstance(event, dict))
        return
    except (ValueError, RecursionError, TypeError):
        notes.add(f"{name} is damaged; the figure shows what can be read")
    for line in data.split(b"\n"):  # FlowTrain writes an event a line
        try:
            event = json.loads(line.strip().rstrip(b","))
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            yield event


def _work(events: Iterable[Mapping[str, Any]]) -> Iterator[Work]:
    actors: dict[object, str] = {}
    lanes: dict[tuple[object, object], str] = {}
    for event in events:
        kind, pid, tid = event.get("ph"), str(event.get("pid")), str(event.get("tid"))
        args = event.get("args")
        args = args if isinstance(args, Mapping) else {}
        if kind == "M" and event.get("name") == "process_name":
            actors[pid] = as_text(args.get("name"))
        elif kind == "M" and event.get("name") == "thread_name":
            lanes[pid, tid] = as_text(args.get("name"))
        elif kind == "X":
            start, length = as_number(event.get("ts")) / 1e6, as_number(event.get("dur")) / 1e6
            if math.isfinite(start) and math.isfinite(length) and length >= 0:
                actor = actors.get(pid) or pid
                lane = lanes.get((pid, tid)) or tid
                yield Work(actor, lane, tid, as_text(event.get("name")), start, start + length, args)


def step_ends(work: Sequence[Work], steps: Steps) -> dict[int, float]:
    """Return the end of each traced step, in seconds since the Unix epoch.

    A step ends with its last optimizer span. Spans that do not name their step belong to the step that was written down
    next after them.
    """
    optimizer = [each for each in work if each.name == "optimizer"]
    named: dict[int, float] = {}
    for each in optimizer:
        step = as_number(each.args.get("step"))
        if math.isfinite(step):
            named[int(step)] = max(named.get(int(step), 0.0), each.end_s)
    if named:
        return dict(sorted(named.items()))
    ends = sorted(each.end_s for each in optimizer)
    found: dict[int, float] = {}
    if not ends:
        return found
    before = -math.inf
    for step, written in zip(steps.step, steps["timestamp"], strict=True):
        place = bisect_right(ends, written + _SLACK_S) - 1
        if place >= 0 and ends[place] > before:
            found[int(step)] = before = ends[place]
    return found


def gantt_of(work: Sequence[Work], steps: Steps, first: int | None = None, last: int | None = None) -> Gantt | None:
    """Return the picture of some steps; None if the trace has none of them.

    first, last: the steps; None: three from the middle of the trace, where a run has settled.
    """
    ends = step_ends(work, steps)
    traced = [step for step in ends if step - 1 in ends]  # whose start is known too
    if first is None:
        middle = max(0, (len(traced) - DEFAULT_STEPS) // 2)
        chosen = traced[middle : middle + DEFAULT_STEPS]
    else:
        chosen = [step for step in ends if first <= step <= (first if last is None else last)]
    if not chosen:
        return None
    start_s, end_s = ends.get(chosen[0] - 1), ends[chosen[-1]]
    if start_s is None:  # the first step of a trace starts with its first span
        start_s = min(each.start_s for each in work)
    if end_s <= start_s:
        return None
    inside = [each for each in work if each.end_s > start_s and each.start_s < end_s]
    shown, num_left_out = _shown_actors({each.actor for each in inside})
    rows = _rows([each for each in inside if each.actor in shown], shown, start_s, end_s)
    marks = tuple((step, ends[step] - start_s) for step in chosen)
    return Gantt(chosen[0], chosen[-1], end_s - start_s, marks, rows, num_left_out)


def step_picture(work: Sequence[Work], step: int) -> Gantt:
    """Return the picture of one step that starts and ends with its work."""
    start_s, end_s = min(each.start_s for each in work), max(each.end_s for each in work)
    shown, num_left_out = _shown_actors({each.actor for each in work})
    rows = _rows([each for each in work if each.actor in shown], shown, start_s, end_s)
    return Gantt(step, step, end_s - start_s, ((step, end_s - start_s),), rows, num_left_out)


def _shown_actors(actors: set[str]) -> tuple[list[str], int]:
    """Order actors by role, and of too many take some of each role at even distances."""
    by_role: dict[str, list[str]] = defaultdict(list)
    for actor in sorted(actors, key=_natural):
        by_role[next((role for role in _ROLES if actor.startswith(role)), "")].append(actor)
    while sum(map(len, by_role.values())) > MAX_ACTORS:
        most = max(by_role, key=lambda role: len(by_role[role]))
        del by_role[most][1::2]
    shown = [actor for role in (*_ROLES, "") for actor in by_role.get(role, ())]
    return shown, len(actors) - len(shown)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key by which ``encoder-10`` comes after ``encoder-9``."""
    parts = re.split("([0-9]+)", name)
    return [(int(part[:18]), "") if number % 2 else (-1, part) for number, part in enumerate(parts)]


def _rows(work: Sequence[Work], actors: Sequence[str], start_s: float, end_s: float) -> tuple[Row, ...]:
    lanes: dict[tuple[str, str, str], list[Work]] = defaultdict(list)
    for each in work:
        lanes[each.actor, each.lane, each.lane_id].append(each)
    shortest = (end_s - start_s) * max(len(work) / MAX_BARS, 1.0) / 1000
    rows: list[Row] = []
    for actor in actors:
        of_actor = sorted(key for key in lanes if key[0] == actor)
        of_actor.sort(key=lambda key: key[1] != actor)  # its own work first, then that of its side threads
        for number, key in enumerate(of_actor):
            label = actor if not number else key[1].removeprefix(actor).strip()
            rows.append(Row(actor, label, tuple(_bars(lanes[key], start_s, end_s, shortest))))
    return tuple(rows)


def _bars(work: Sequence[Work], start_s: float, end_s: float, shortest: float) -> Iterator[Bar]:
    """Cut work to the picture; pieces of one kind that are too short to be seen, and close to each other, are one."""
    open_bar: Bar | None = None
    for each in sorted(work, key=lambda one: (one.start_s, -one.end_s)):
        start, end = max(each.start_s, start_s) - start_s, min(each.end_s, end_s) - start_s
        is_short = each.end_s - each.start_s < shortest
        if open_bar is not None and is_short and open_bar.name == each.name and start - open_bar.end_s < shortest:
            open_bar = Bar(each.name, open_bar.start_s, max(end, open_bar.end_s), open_bar.count + 1, open_bar.text)
            continue
        if open_bar is not None:
            yield open_bar
            open_bar = None
        bar = Bar(each.name, start, end, 1, _details(each))
        if is_short:
            open_bar = bar
        else:
            yield bar
    if open_bar is not None:
        yield open_bar


def _details(work: Work) -> str:
    return ", ".join(f"{key} {value}" for key, value in list(work.args.items())[:8])
