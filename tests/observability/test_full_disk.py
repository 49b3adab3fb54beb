"""What a full or broken disk leaves of the files of a run: no torn line, nothing lost, nothing twice."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.observability import files as files_module
from flowtrain.observability.diagnostics import Diagnostic
from flowtrain.observability.files import JsonLines, replace_text
from flowtrain.observability.ledger import LedgerRow, LedgerState, LedgerWriter, read_ledger
from flowtrain.observability.progress import ProgressDisplay, ProgressState
from flowtrain.observability.trace import TraceWriter, read_spans
from flowtrain.types.messages import Span
from tests.disk import full_from


def numbers(path: Path) -> list[int]:
    return [json.loads(line)["n"] for line in path.read_text().splitlines()]


def append(lines: JsonLines, number: int) -> bool:
    try:
        lines.append({"n": number})
    except OSError:
        return False
    return True


@given(room=st.lists(st.integers(0, 60), min_size=1, max_size=12), syncs=st.sets(st.integers(0, 11)))
def test_lines_are_never_torn_and_none_is_lost_however_the_room_changes(
    tmp_path_factory: pytest.TempPathFactory, room: list[int], syncs: set[int]
) -> None:
    path = tmp_path_factory.mktemp("full") / "lines.jsonl"
    lines = JsonLines(path)
    for number, free in enumerate(room):
        with full_from(path.stat().st_size + free):
            append(lines, number)
            if number in syncs:
                try:
                    lines.sync()
                except OSError:
                    assert lines.waiting_nbytes
        found = numbers(path)  # each line parses
        assert found == list(range(len(found)))
    assert append(lines, len(room))
    assert numbers(path) == list(range(len(room) + 1)) and lines.waiting_nbytes == 0
    lines.close()


def test_lines_that_a_failed_sync_may_have_dropped_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines.jsonl"
    lines = JsonLines(path)
    append(lines, 0)
    lines.sync()
    append(lines, 1)
    with monkeypatch.context() as broken:
        broken.setattr(files_module.os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(5, "I/O error")))
        with pytest.raises(OSError, match="I/O error"):
            lines.sync()
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size // 2] + b"\x00" * (size - size // 2))  # the system lost these pages
    lines.sync()
    assert numbers(path) == [0, 1]


def test_a_file_that_cannot_be_replaced_stays_and_leaves_no_rubbish(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    replace_text(path, "old")
    with full_from(10), pytest.raises(OSError):
        replace_text(path, "new" * 10)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def span(number: int) -> Span:
    return Span("encoder-0", "encode", float(number), number + 0.5)


@given(room=st.integers(0, 700))
def test_a_trace_on_a_full_disk_keeps_the_spans_before(tmp_path_factory: pytest.TempPathFactory, room: int) -> None:
    path = tmp_path_factory.mktemp("full") / "trace.json"
    trace = TraceWriter(path)
    trace.write([span(0)])
    written = 1
    with full_from(path.stat().st_size + room):
        for number in range(1, 5):
            try:
                trace.write([span(number)])
            except OSError:
                break
            written += 1
    trace.close()
    assert [each.start_s for each in read_spans(path)] == [float(number) for number in range(written)]


def rows(step: int) -> list[LedgerRow]:
    return [LedgerRow(step, "data", step, 0, step, 0, 0, LedgerState.CONSUMED)]


def test_rows_of_the_ledger_wait_and_are_written_once(tmp_path: Path) -> None:
    path = tmp_path / "ledger.parquet"
    ledger = LedgerWriter(path)
    ledger.append(rows(1))
    ledger.flush()
    ledger.append(rows(2))
    with full_from(100), pytest.raises(OSError):
        ledger.flush()
    assert read_ledger(path)["step"].to_pylist() == [1], "the part before is whole"
    assert [part.name for part in path.iterdir()] == ["part-00000001-00000001.parquet"]
    assert ledger.waiting_nbytes > 100
    ledger.append(rows(3))
    ledger.flush()
    assert read_ledger(path)["step"].to_pylist() == [1, 2, 3]


def test_a_part_that_was_written_is_not_written_again_though_its_name_was_not_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.parquet"
    ledger = LedgerWriter(path)
    ledger.append(rows(1))
    calls: list[Path] = []

    def fail_once(directory: Path) -> None:
        calls.append(directory)
        if len(calls) == 1:
            raise OSError(5, "I/O error")

    monkeypatch.setattr("flowtrain.observability.ledger.sync_directory", fail_once)
    with pytest.raises(OSError):
        ledger.flush()
    ledger.append(rows(2))
    ledger.flush()
    ledger.flush()
    assert read_ledger(path)["step"].to_pylist() == [1, 2] and len(calls) == 2


def test_a_kill_while_a_part_was_written_leaves_nothing_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "ledger.parquet"
    ledger = LedgerWriter(path)
    (path / ".part-00000001-00000001.parquet.tmp").write_bytes(b"torn")
    ledger.truncate_after(0)
    assert list(path.iterdir()) == []


# --- what only shows the run ----------------------------------------------------------------------------------------


def refuse() -> None:
    raise OSError(28, "No space left on device")


def test_a_diagnostic_that_fails_is_off_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    output = Diagnostic("trace.json")
    written: list[int] = []
    output.attempt(written.append, 1)
    output.attempt(refuse)
    output.attempt(written.append, 2)
    output.close(refuse)
    assert written == [1] and not output.is_on
    assert [message.split(":")[0] for message in caplog.messages] == [
        "trace.json could not be written, it is off from now on, training goes on",
        "trace.json could not be closed",
    ]


def test_one_that_is_tried_again_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    output = Diagnostic("profile.json", retries=True)
    written: list[int] = []
    for action in (refuse, refuse, lambda: written.append(1)):
        output.attempt(action)
    assert written == [1] and len(caplog.messages) == 1 and "tried again" in caplog.messages[0]


class Broken(io.StringIO):
    """A terminal that went away, or the end of a pipe that nobody reads."""

    def __init__(self, error: OSError, terminal: bool) -> None:
        super().__init__()
        self._error, self._terminal = error, terminal

    def write(self, text: str) -> int:
        raise self._error

    def isatty(self) -> bool:
        return self._terminal


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), BrokenPipeError(32, "Broken pipe")])
def test_a_display_whose_stream_breaks_goes_off_and_its_notes_go_to_the_log(
    error: OSError, terminal: bool, make_metrics: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with ProgressDisplay("auto", total_steps=3, stream=Broken(error, terminal)) as display:
        display.phase("starting")
        for step in (1, 2, 3):
            display.update(ProgressState(make_metrics(step), 1024))
        display.note("encoder-0 died")
        display.close()
    assert "the progress display could not be written" in caplog.text
    assert "encoder-0 died" in caplog.messages


def test_a_device_that_is_always_full_refuses_each_line(tmp_path: Path) -> None:
    path = tmp_path / "full.jsonl"
    path.symlink_to("/dev/full")
    lines = JsonLines(path)
    assert not append(lines, 1) and not append(lines, 2)
    assert lines.waiting_nbytes == len('{"n": 1}\n') * 2
    lines.close()
    with pytest.raises(OSError):
        os.fstat(lines._descriptor)
