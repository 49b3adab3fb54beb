from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.observability.trace import TraceWriter, read_spans
from flowtrain.types.messages import Span

T0 = 1_700_000_000.0


def span(actor: str, name: str, start: float, end: float) -> Span:
    return Span(actor, name, T0 + start, T0 + end, {"step": 1})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


def events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return found


def test_the_file_is_valid_json_at_every_moment(path: Path) -> None:
    writer = TraceWriter(path)
    assert events(path) == []
    for index in range(3):
        writer.write([span("encoder-0", "encode", index, index + 0.5)])
        assert sum(event["ph"] == "X" for event in events(path)) == index + 1
    writer.write([])
    writer.close()
    assert len(read_spans(path)) == 3


def test_one_process_row_per_actor_and_side_work_on_lanes_of_its_own(path: Path) -> None:
    writer = TraceWriter(path)
    writer.write(
        [span("encoder-0", "decode", 0, 2), span("encoder-0", "decode", 1, 3), span("encoder-0", "encode", 2, 4)]
    )
    writer.write([span("backbone-dp0-pp0-tp0", "forward", 1, 2), span("encoder-0", "put", 4, 5)])
    rows = [(e["pid"], e["args"]["name"]) for e in events(path) if e["name"] == "process_name"]
    assert rows == [(1, "encoder-0"), (2, "backbone-dp0-pp0-tp0")]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events(path) if e["name"] == "thread_name"}
    assert lanes == {
        (1, 1): "encoder-0 decode",
        (1, 2): "encoder-0 decode",
        (1, 3): "encoder-0",
        (2, 1): "backbone-dp0-pp0-tp0",
    }


def test_spans_come_back_as_they_went_in(path: Path) -> None:
    spans = [span("b", "forward", 0.25, 0.5), span("b", "backward", 0.5, 1.75), span("a", "fetch", 0, 1)]
    writer = TraceWriter(path)
    writer.write(spans)
    read = sorted(read_spans(path), key=lambda s: (s.actor, s.start_s))
    for got, want in zip(read, sorted(spans, key=lambda s: (s.actor, s.start_s)), strict=True):
        assert (got.actor, got.name, got.args) == (want.actor, want.name, want.args)
        assert got.start_s == pytest.approx(want.start_s, abs=1e-5)
        assert got.end_s == pytest.approx(want.end_s, abs=1e-5)


@settings(deadline=None)
@given(
    st.lists(
        st.lists(
            st.builds(
                lambda actor, name, start, length: span(actor, name, start, start + length),
                st.sampled_from(["a", "b"]),
                st.sampled_from(["decode", "encode", "fetch", "forward"]),
                st.integers(0, 50),
                st.integers(1, 10),
            )
        ),
        max_size=4,
    )
)
def test_no_lane_has_spans_that_overlap_without_nesting(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[Span]]
) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    writer = TraceWriter(path)
    for batch in batches:
        writer.write(batch)
    shown = [event for event in events(path) if event["ph"] == "X"]
    assert len(shown) == sum(map(len, batches))
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in shown:
        lanes.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for lane in lanes.values():
        for (_, end), (start, later_end) in pairwise(sorted(lane, key=lambda s: (s[0], -s[1]))):
            assert start >= end or later_end <= end
