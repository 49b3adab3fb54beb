"""What each rank does and holds over a simulated step: as lines of text, and in Chrome's trace format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from flowtrain.pipeline.partition import Partition
from flowtrain.simulator.engine import Timeline
from flowtrain.simulator.memory import HeldMemory
from flowtrain.simulator.program import Op

FORWARD, BACKWARD, STARVED, IDLE = "▀▄· "
"""A rank runs a forward or a backward, waits for data, or for another rank."""
BOTH = "█"
"""Forwards and backwards of a line of text, which are too short to be told apart."""
_PART = 0.25
_KINDS = (FORWARD, BACKWARD, STARVED, IDLE)
_MICROSECONDS = 1e6
_GIB = 2**30


def text_rows(timeline: Timeline, ranks: range, width: int) -> list[str]:
    """Return a line of ``width`` characters for each rank; a character shows what takes most of its time.

    ``BOTH`` where forwards and backwards take at least a quarter of the time each that a rank computes.
    """
    begin, end = float(timeline.starts.min()), timeline.makespan_s
    edges = np.linspace(begin, end, width + 1)
    rows = []
    for rank in ranks:
        shares = np.zeros((len(_KINDS), width))
        for sign, _, start, stop in rank_spans(timeline, rank):
            inside = np.minimum(edges[1:], stop) - np.maximum(edges[:-1], start)
            shares[_KINDS.index(sign)] += np.maximum(inside, 0.0)
        shares[-1] = np.maximum(np.diff(edges) - shares[:-1].sum(axis=0), 0.0)
        signs = np.array(_KINDS)[shares.argmax(axis=0)]
        computes = shares[:2].sum(axis=0)
        is_both = (shares[:2].min(axis=0) >= _PART * computes) & (computes > shares[2:].max(axis=0))
        rows.append("".join(np.where(is_both, BOTH, signs)))
    return rows


def rank_spans(timeline: Timeline, rank: int) -> Iterator[tuple[str, int, float, float]]:
    """Yield what a rank does: its sign, the microbatch, start and end in seconds."""
    program = timeline.program
    for op in range(program.first[rank], program.first[rank + 1]):
        start, end = float(timeline.starts[op]), float(timeline.ends[op])
        if program.op[op] == Op.COMPUTE:
            number = program.index[op]
            sign = BACKWARD if program.computations.is_backward[number] else FORWARD
            yield sign, int(program.computations.microbatch[number]), start, end
        elif program.op[op] == Op.FETCH and end > start:
            yield STARVED, int(program.fetches.microbatch[program.index[op]]), start, end


def trace_events(timeline: Timeline, partition: Partition) -> list[dict[str, Any]]:
    """Return the events of a Chrome trace: a process for each replica, a thread for each of its pipeline ranks."""
    program, columns = timeline.program, timeline.program.computations
    pp = program.num_ranks // program.num_replicas
    events: list[dict[str, Any]] = [
        {
            "ph": "M",
            "name": "process_name",
            "pid": replica,
            "args": {"name": f"{_named(replica, int(count))} (simulated)"},
        }
        for replica, count in enumerate(program.stands_for)
    ]
    for number in range(len(columns)):
        rank, op = int(columns.rank[number]), int(columns.op[number])
        stage = partition.stages[int(columns.place[number])]
        name = "backward" if columns.is_backward[number] else "forward"
        events.append(
            {
                "ph": "X",
                "name": f"{name} {int(columns.microbatch[number])}",
                "cat": stage.module.value,
                "pid": rank // pp,
                "tid": rank % pp,
                "ts": _MICROSECONDS * float(timeline.starts[op]),
                "dur": _MICROSECONDS * float(timeline.ends[op] - timeline.starts[op]),
                "args": {"stage": stage.text, "microbatch": int(columns.microbatch[number])},
            }
        )
    return events


def _named(replica: int, count: int) -> str:
    return f"replica {replica}" if count == 1 else f"replica {replica} and {count - 1} like it"


def memory_events(memory: HeldMemory, timeline: Timeline) -> list[dict[str, Any]]:
    """Return counters for a Chrome trace: what each rank holds over the step, in GiB."""
    pp = timeline.program.num_ranks // timeline.program.num_replicas
    return [
        {
            "ph": "C",
            "name": f"memory of rank {rank % pp}",
            "pid": rank // pp,
            "ts": _MICROSECONDS * when_s,
            "args": {"GiB": nbytes / _GIB},
        }
        for rank in range(timeline.program.num_ranks)
        for when_s, nbytes in memory.levels(timeline, rank)
    ]
