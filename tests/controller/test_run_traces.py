"""Which spans go into which trace, and that a full disk under one changes nothing else."""

from __future__ import annotations

import json
import logging
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from flowtrain.controller.run_traces import RunTraces
from flowtrain.observability.run_dir import RunDir
from flowtrain.observability.trace import read_spans
from flowtrain.types.events import CheckpointWritten, SpansRecorded, UnitDone
from flowtrain.types.messages import Span
from flowtrain.types.plan import Flops, Unit, UnitKind
from flowtrain.types.samples import SamplerState
from flowtrain.types.tracing import Counter, TraceSteps
from tests.disk import full_from


@pytest.fixture
def files(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def done(step: int, kind: UnitKind = UnitKind.TRAIN) -> UnitDone:
    return UnitDone(
        unit=Unit(step, kind, step, 0, 1),
        reports=(),
        plan_digest="",
        plan_time_s=0.0,
        plan_wait_s=0.0,
        num_microbatches=1,
        packing_fill=1.0,
        dp_imbalance=0.0,
        flops=Flops(0.0, 0.0, 0.0),
        blocked_s=0.0,
        produced_samples=0,
        num_rejected=0,
        pool_dram_nbytes=0,
        pool_dram_bound_nbytes=0,
        ledger=(),
        sampler_state=SamplerState(0),
    )


def spans_of(step: int) -> SpansRecorded:
    spans = (Span("backbone", f"step {step}", float(step), step + 0.5),)
    return SpansRecorded(spans, (Counter("backbone", "pool dram", float(step), {"used bytes": 1.0}),))


def run(traces: RunTraces, steps: Sequence[int]) -> None:
    for step in steps:
        traces.take(spans_of(step))
        traces.take(done(step))


def names(path: Path) -> list[str]:
    return [span.name for span in read_spans(path)]


def test_trace_json_has_the_first_steps_of_a_start(files: RunDir) -> None:
    traces = RunTraces(files, num_done=10, num_steps=2)
    traces.take(CheckpointWritten(10, "elsewhere"))
    run(traces, [11, 12, 13])
    traces.close()
    assert names(files.trace) == ["step 11", "step 12"]
    events = json.loads(files.trace.read_text())["traceEvents"]
    assert sum(event["ph"] == "C" for event in events) == 2


def test_without_steps_trace_json_is_empty(files: RunDir) -> None:
    traces = RunTraces(files, num_done=0, num_steps=0)
    traces.open_window(TraceSteps(1, 1))
    run(traces, [1])
    assert names(files.trace) == []


def test_a_window_has_its_steps_in_a_private_directory_of_its_own(files: RunDir) -> None:
    traces = RunTraces(files, num_done=0, num_steps=1)
    run(traces, [1, 2])
    directory = traces.open_window(TraceSteps(3, 4))
    assert directory == files.windows / "steps-3-4" and traces.has_window
    assert stat.S_IMODE(directory.stat().st_mode) == stat.S_IMODE(files.windows.stat().st_mode) == 0o700
    traces.take(done(3, UnitKind.EVAL))
    run(traces, [3, 4])
    assert not traces.has_window and traces.num_done == 4
    run(traces, [5])
    assert names(directory / "trace.json") == ["step 3", "step 4"] and names(files.trace) == ["step 1"]


def test_actors_that_start_later_record_what_an_open_trace_still_covers(files: RunDir) -> None:
    traces = RunTraces(files, num_done=10, num_steps=2)
    assert traces.last_step == 12
    run(traces, [11])
    traces.open_window(TraceSteps(14, 20))
    assert traces.last_step == 20
    run(traces, range(12, 21))
    assert traces.last_step == 0, "nobody wants spans"


def test_steps_of_both_are_in_both(files: RunDir) -> None:
    traces = RunTraces(files, num_done=0, num_steps=3)
    run(traces, [1])
    directory = traces.open_window(TraceSteps(2, 2))
    run(traces, [2, 3, 4])
    assert names(directory / "trace.json") == ["step 2"]
    assert names(files.trace) == ["step 1", "step 2", "step 3"]


def test_a_window_of_the_same_steps_after_a_resume_has_another_directory(files: RunDir) -> None:
    for expected in ("steps-3-4", "steps-3-4-2", "steps-3-4-3"):
        traces = RunTraces(files, num_done=0, num_steps=0)
        assert traces.open_window(TraceSteps(3, 4)).name == expected
        traces.close()


def test_an_evaluation_ends_no_trace(files: RunDir) -> None:
    traces = RunTraces(files, num_done=0, num_steps=1)
    traces.take(done(1, UnitKind.EVAL))
    run(traces, [1])
    assert names(files.trace) == ["step 1"]


def test_a_request_of_an_earlier_run_is_dropped(files: RunDir) -> None:
    (files.root / ".trace-request.json").write_text('{"id": "old", "steps": 3}')
    RunTraces(files, num_done=0, num_steps=0).close()
    assert not (files.root / ".trace-request.json").exists()


def test_a_full_disk_ends_a_trace_and_nothing_else(files: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    traces = RunTraces(files, num_done=0, num_steps=5)
    run(traces, [1])
    with full_from(files.trace.stat().st_size), caplog.at_level(logging.WARNING):
        run(traces, [2, 3])
    run(traces, [4])
    traces.close()
    assert names(files.trace) == ["step 1"], "what was written is whole"
    assert len(caplog.messages) == 1 and "training goes on" in caplog.messages[0]


def test_a_directory_that_cannot_be_written_ends_no_run(
    files: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    traces = RunTraces(replace(files, root=files.root / "gone"), num_done=0, num_steps=5)
    run(traces, [1])
    with pytest.raises(OSError):
        traces.open_window(TraceSteps(2, 3))
    assert not traces.has_window
    traces.close()
    assert any("trace.json could not be written" in message for message in caplog.messages)


def test_a_window_without_a_span_leaves_no_directory(files: RunDir) -> None:
    traces = RunTraces(files, num_done=0, num_steps=0)
    directory = traces.open_window(TraceSteps(1, 2))
    assert traces.drop_window() and not directory.exists() and not traces.has_window
    directory = traces.open_window(TraceSteps(1, 2))
    traces.take(spans_of(1))
    assert not traces.drop_window() and names(directory / "trace.json") == ["step 1"]
    directory = traces.open_window(TraceSteps(3, 4))
    (directory / "profiler-backbone.json").touch()
    assert not traces.drop_window() and (directory / "profiler-backbone.json").exists()
    assert not traces.drop_window(), "no window is open"
