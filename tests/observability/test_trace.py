from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.observability.trace import TraceWriter, read_events, read_spans
from flowtrain.types.messages import Span
from flowtrain.types.tracing import Counter

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
        (2, 4): "backbone-dp0-pp0-tp0",
    }, "Perfetto names a thread by its number alone, so no two lanes have one"


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


# --- arrows and counters ------------------------------------------------------------------------------------------


def encode(start: float, *positions: int, actor: str = "encoder-0") -> Span:
    return Span(actor, "encode", T0 + start, T0 + start + 1, produces=positions)


def forward(start: float, *positions: int, actor: str = "backbone") -> Span:
    return Span(actor, "forward", T0 + start, T0 + start + 1, consumes=positions)


def arrows(path: Path) -> list[tuple[float, float]]:
    """Starts of the two spans of each arrow, in seconds; fails unless each end is bound as viewers bind it."""
    found = events(path)
    ends: dict[str, dict[int, dict[str, Any]]] = {"s": {}, "f": {}}
    spans: set[tuple[int, int, float]] = set()
    for event in found:
        if event["ph"] == "X":
            spans.add((event["pid"], event["tid"], event["ts"]))
        elif event["ph"] in ends:
            assert type(event["id"]) is int, "Perfetto reads text as a hexadecimal number"
            assert event["id"] not in ends[event["ph"]], "an end belongs to one arrow"
            assert (event["pid"], event["tid"], event["ts"]) in spans, "its span comes before it in the file"
            assert event.get("bp") == ("e" if event["ph"] == "f" else None)
            ends[event["ph"]][event["id"]] = event
    assert ends["s"].keys() == ends["f"].keys(), "every arrow has its two ends"
    pairs = [(ends["s"][number], ends["f"][number]) for number in ends["s"]]
    assert all((one["name"], one["cat"]) == (other["name"], other["cat"]) for one, other in pairs)
    return sorted((one["ts"] / 1e6 - T0, other["ts"] / 1e6 - T0) for one, other in pairs)


def test_arrows_lead_from_each_encode_to_the_forward_that_consumes_it(path: Path) -> None:
    writer = TraceWriter(path)
    writer.write([encode(0, 1, 2), encode(2, 3), encode(4, 4)])
    assert arrows(path) == [], "nothing has consumed them yet"
    writer.write([forward(6, 2, 3, 9), forward(8, 1)])
    assert arrows(path) == [(0, 6), (0, 8), (2, 6)]
    writer.write([forward(10, 1, 2, 3)])
    assert len(arrows(path)) == 3, "a position is consumed once"


def test_an_arrow_leads_from_the_last_encode_of_a_lost_part(path: Path) -> None:
    writer = TraceWriter(path)
    writer.write([encode(0, 1), encode(2, 1, actor="encoder-1")])
    writer.write([forward(4, 1)])
    assert arrows(path) == [(2, 4)]


def test_a_forward_that_seems_to_come_before_its_encode_has_its_arrow(path: Path) -> None:
    writer = TraceWriter(path)
    writer.write([forward(0.5, 1), encode(0.6, 1)])  # clocks of two nodes agree only so far
    assert len(arrows(path)) == 1


positions = st.lists(st.integers(0, 8), max_size=4, unique=True)
work = st.one_of(
    st.builds(lambda start, made: encode(start, *made), st.integers(0, 50), positions),
    st.builds(lambda start, made: encode(start, *made, actor="encoder-1"), st.integers(0, 50), positions),
    st.builds(lambda start, used: forward(start, *used), st.integers(0, 50), positions),
)


@settings(deadline=None)
@given(st.lists(st.lists(work, max_size=6), max_size=5))
def test_every_arrow_has_its_two_ends(tmp_path_factory: pytest.TempPathFactory, batches: list[list[Span]]) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    writer = TraceWriter(path)
    for batch in batches:
        writer.write(batch)
        arrows(path)
    spans = [each for batch in batches for each in batch]
    produced = {position for each in spans for position in each.produces}
    num_uses = sum(len(each.consumes) for each in spans)
    assert len(arrows(path)) <= num_uses
    if not produced:
        assert arrows(path) == []


def test_counters_belong_to_their_actor(path: Path) -> None:
    writer = TraceWriter(path)
    writer.write([span("encoder-0", "encode", 0, 1)], [Counter("encoder-0", "pool dram", T0 + 1, {"used": 3.0})])
    writer.write([], [Counter("coordinator", "units sized ahead", T0 + 2, {"units": 2})])
    found = [event for event in events(path) if event["ph"] == "C"]
    assert [(each["pid"], each["name"], each["args"]) for each in found] == [
        (1, "pool dram", {"used": 3.0}),
        (2, "units sized ahead", {"units": 2}),
    ]
    assert [each["ts"] for each in found] == [(T0 + 1) * 1e6, (T0 + 2) * 1e6]
    assert len(read_spans(path)) == 1


# --- a kill in the middle of a write ------------------------------------------------------------------------------


@given(st.integers(0, 3), st.data())
def test_a_kill_in_the_middle_of_a_write_leaves_the_events_before(
    tmp_path_factory: pytest.TempPathFactory, num_before: int, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("killed") / "trace.json"
    writer = TraceWriter(path)
    for number in range(num_before):
        writer.write([span("a", "encode", number, number + 0.5)])
    before, known = path.read_bytes(), read_events(path)
    writer.write([span("a", "encode", 10, 11), span("b", "forward", 10, 12)])
    after = path.read_bytes()
    start = len(before) - len(b"\n]}\n")
    written = data.draw(st.integers(0, len(after) - start), label="bytes that reached the file")
    torn = bytearray(before)
    torn[start : start + written] = after[start : start + written]
    path.write_bytes(torn)
    found = read_events(path)
    assert found[: len(known)] == known
    assert found == read_all(after)[: len(found)]
    assert len(read_spans(path)) >= num_before


def read_all(data: bytes) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(data)["traceEvents"]
    return found


def test_events_have_what_the_format_asks_of_them(path: Path) -> None:
    writer = TraceWriter(path)
    writer.write([encode(0, 1), forward(2, 1)], [Counter("encoder-0", "pool dram", T0, {"used": 1.0})])
    needed = {"X": {"ts", "dur", "tid"}, "C": {"ts", "args"}, "M": {"args"}, "s": {"ts", "tid", "id", "cat"}}
    needed["f"] = needed["s"] | {"bp"}
    whole = json.loads(path.read_text())
    assert whole["displayTimeUnit"] in ("ms", "ns")
    assert {event["ph"] for event in whole["traceEvents"]} == needed.keys()
    for event in whole["traceEvents"]:
        assert {"name", "pid", *needed[event["ph"]]} <= event.keys(), event
        assert all(type(event[key]) in (int, float) for key in ("ts", "dur") if key in event)
