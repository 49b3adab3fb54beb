"""The timeline of chosen steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowtrain.observability.report.gantt import MAX_ACTORS, Gantt, Work, gantt_of, read_trace, step_ends
from flowtrain.observability.report.gantt_svg import draw_gantt, kinds_in
from flowtrain.observability.report.reading import Notes
from flowtrain.observability.report.run_data import read_run
from flowtrain.observability.report.steps import Steps, steps_of
from tests.report.parsed import parsed
from tests.report.runs import HOSTILE, START_S, trace_events, write_run, write_trace


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_run(tmp_path, num_steps=30)


def steps(*timestamps: float) -> Steps:
    return steps_of({"step": number, "timestamp": at} for number, at in enumerate(timestamps, start=1))


def work(name: str, start_s: float, end_s: float, actor: str = "a", **args: int | str) -> Work:
    return Work(actor, actor, "1", name, start_s, end_s, args)


def shown(directory: Path, first: int | None = None, last: int | None = None) -> Gantt:
    run = read_run(directory)
    found = gantt_of(read_trace(run.files.trace, Notes()), run.steps, first, last)
    assert found is not None
    return found


def test_three_steps_from_the_middle_of_the_trace_or_those_asked_for(directory: Path) -> None:
    default = shown(directory)
    assert (default.first_step, default.last_step) == (10, 12)
    assert default.duration_s == pytest.approx(3.0, abs=1e-3)
    assert [step for step, _ in default.ends_s] == [10, 11, 12]
    one = shown(directory, 5, 5)
    assert (one.first_step, one.last_step) == (5, 5) and one.duration_s == pytest.approx(1.0, abs=1e-3)
    start = shown(directory, 1, 2)
    assert start.first_step == 1 and start.duration_s == pytest.approx(1.97, abs=0.02), "from the first span"
    run = read_run(directory)
    assert gantt_of(read_trace(run.files.trace, Notes()), run.steps, 25, 27) is None, "it was not traced"


def test_lanes_are_in_the_order_of_the_data_with_side_work_below(directory: Path) -> None:
    rows = shown(directory).rows
    assert [row.label for row in rows] == [
        *("feeder-0", "coordinator", "encoder-0", "decode", "encoder-1", "decode", "backbone-dp0-pp0-tp0", "fetch")
    ]
    backbone = rows[6].bars
    assert {bar.name for bar in backbone} == {"forward", "backward", "optimizer"}
    assert all(0 <= bar.start_s <= bar.end_s <= 3.0001 for row in rows for bar in row.bars)


def test_steps_are_found_by_their_number_or_by_when_they_were_written_down() -> None:
    spans = [work("optimizer", at - 0.1, at, actor) for at in (10.0, 20.0, 30.0) for actor in ("a", "b")]
    assert step_ends(spans, steps(10.2, 20.01, 30.3)) == {1: 10.0, 2: 20.0, 3: 30.0}
    assert step_ends(spans, steps(9.0, 20.01)) == {2: 20.0}, "step 1 was not traced"
    named = [work("optimizer", 9.0, 10.0, step=7), work("optimizer", 9.0, 10.5, "b", step=7)]
    assert step_ends(named, steps(1.0)) == {7: 10.5}
    assert step_ends([], steps(1.0)) == {}


def test_many_short_pieces_in_a_row_are_one_bar(directory: Path) -> None:
    ends = [work("optimizer", 0.0, 0.0, step=1), work("optimizer", 99.0, 100.0, step=2)]
    pieces = [work("put", 10 + 0.001 * n, 10.0005 + 0.001 * n) for n in range(500)]
    found = gantt_of([*ends, *pieces, work("forward", 50.0, 60.0)], steps(0.0, 100.0))
    assert found is not None
    (row,) = found.rows
    assert [(bar.name, bar.count) for bar in row.bars] == [("put", 500), ("forward", 1), ("optimizer", 1)]


def test_lanes_of_one_name_stay_apart() -> None:
    spans = [work("optimizer", 0.0, 0.0, step=1), work("optimizer", 9.0, 10.0, step=2)]
    spans += [Work("a", "a fetch", lane, "fetch", 1.0, 5.0, {}) for lane in ("2", "3")]
    found = gantt_of(spans, steps(0.0, 10.0))
    assert found is not None and [(row.label, len(row.bars)) for row in found.rows] == [
        *(("a", 1), ("fetch", 1), ("fetch", 1))
    ]


def test_of_too_many_actors_some_of_each_role_are_shown() -> None:
    actors = [f"encoder-{n}" for n in range(100)] + [f"backbone-dp{n}-pp0-tp0" for n in range(10)] + ["feeder-0"]
    ends = [work("optimizer", 0.0, 0.0, step=1), work("optimizer", 9.0, 10.0, step=2)]
    found = gantt_of([*ends, *(work("encode", 1.0, 2.0, actor) for actor in actors)], steps(0.0, 10.0))
    assert found is not None
    names = list(dict.fromkeys(row.actor for row in found.rows))
    assert len(names) <= MAX_ACTORS and found.num_left_out == len(actors) + 1 - len(names)
    assert {"feeder-0", "encoder-0", "backbone-dp0-pp0-tp0"} <= set(names)
    numbers = [int(name.rpartition("-")[2]) for name in names if name.startswith("encoder")]
    assert numbers == sorted(numbers)


def test_a_torn_trace_shows_what_can_be_read(directory: Path) -> None:
    trace, notes = directory / "trace.json", Notes()
    whole = len(read_trace(trace, notes))
    assert notes.texts == ()
    trace.write_bytes(trace.read_bytes()[:-200])
    assert 0 < len(read_trace(trace, notes)) < whole
    assert notes.texts == ("trace.json is damaged; the figure shows what can be read",)
    trace.write_text("[" * 100_000)
    assert read_trace(trace, notes) == [] and read_trace(directory / "absent", notes) == []


def test_other_events_of_a_trace_are_left_out(directory: Path) -> None:
    trace = directory / "trace.json"
    events = trace_events([1, 2])
    count = sum(each["ph"] == "X" for each in events)
    others = [{"ph": "C", "name": "pool", "pid": 1, "ts": 1, "args": {"used": 3}}, {"ph": "s", "id": 4}, 7, None]
    others.append({"ph": "X", "name": "no time", "pid": 1, "tid": 1})
    trace.write_text(json.dumps({"traceEvents": [*events, *others]}))
    assert len(read_trace(trace, Notes())) == count


def test_the_picture_has_a_bar_for_each_and_texts_stay_texts(directory: Path) -> None:
    write_trace(directory / "trace.json", range(1, 10))
    found = shown(directory)
    picture = parsed(str(draw_gantt(found, "g"))).children[0]
    assert not isinstance(picture, str) and picture.attributes["role"] == "img"
    assert len(picture.all("rect", "bar")) == sum(len(row.bars) for row in found.rows)
    assert "feeder-0" in picture.text and "step 5" in picture.text
    hostile = [work("optimizer", 0, 0, step=1), work(HOSTILE, 1, 2, HOSTILE, note=HOSTILE)]
    hostile.append(work("optimizer", START_S, START_S + 1, step=2))
    odd = gantt_of(hostile, steps(0.0, 3.0))
    assert odd is not None and kinds_in(odd) == ["optimizer", "other"]
    (drawn,) = parsed(str(draw_gantt(odd, "g"))).children
    assert not isinstance(drawn, str) and not drawn.all("script") and "<script>" in drawn.text
