"""Which steps an actor traces, and what it profiles meanwhile."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowtrain.actors import profiles as profiles_module
from flowtrain.actors import windows as windows_module
from flowtrain.actors.profiles import Profiles
from flowtrain.actors.windows import Windows
from flowtrain.types.tracing import TraceOrder

CPU = torch.device("cpu")


class FakeProfiles:
    """Notes what is begun and written."""

    log: list[str]

    def __init__(self, order: TraceOrder, name: str, device: torch.device) -> None:
        self.notes = [f"note of {order.last_step}"]
        self._last_step = order.last_step
        self.log.append(f"begin {name} {order.last_step}")

    def write(self) -> None:
        self.log.append(f"write {self._last_step}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(windows_module, "Profiles", FakeProfiles)
    FakeProfiles.log = []
    return FakeProfiles.log


def order(last_step: int, directory: Path | None = None, profiler: bool = True, memory: bool = False) -> TraceOrder:
    return TraceOrder(last_step, str(directory or "nowhere"), profiler, memory)


def traced_steps(windows: Windows, steps: range) -> list[int]:
    traced = []
    for step in steps:
        if windows.begin(CPU, step):
            traced.append(step)
        windows.end(step)
    return traced


def test_the_first_steps_are_traced_and_then_those_that_are_asked_for(log: list[str]) -> None:
    windows = Windows("backbone", last_step=2)
    assert traced_steps(windows, range(1, 5)) == [1, 2]
    ended = windows.ask(order(6, profiler=False))
    assert traced_steps(windows, range(5, 9)) == [5, 6]
    assert ended.result(0) == () and log == []


def test_profiles_begin_with_the_next_step_and_end_with_the_last(log: list[str]) -> None:
    windows = Windows("backbone")
    ended = windows.ask(order(6))
    assert traced_steps(windows, range(5, 6)) == [5]
    assert log == ["begin backbone 6"] and not ended.done()
    assert traced_steps(windows, range(6, 8)) == [6]
    assert log == ["begin backbone 6", "write 6"] and ended.result(0) == ("note of 6",)


def test_an_evaluation_after_the_step_before_the_last_does_not_end_it(log: list[str]) -> None:
    windows = Windows("backbone")
    windows.ask(order(3))
    for step in (2, 2, 3):  # a step, its evaluation round, the next step
        assert windows.begin(CPU, step)
        windows.end(step)
    assert log == ["begin backbone 3", "write 3"]


def test_an_order_that_comes_too_late_does_nothing(log: list[str]) -> None:
    windows = Windows("backbone")
    ended = windows.ask(order(3))
    assert traced_steps(windows, range(4, 6)) == []
    assert log == [] and "past step 3" in ended.result(0)[0]


def test_a_window_does_not_cut_the_first_steps(log: list[str]) -> None:
    windows = Windows("backbone", last_step=10)
    windows.ask(order(3, profiler=False))
    assert traced_steps(windows, range(1, 12)) == list(range(1, 11))


def test_an_actor_without_steps_profiles_until_it_is_told(log: list[str]) -> None:
    windows = Windows("encoder-0")
    ended = windows.ask(order(3))
    for _ in range(5):
        windows.begin(CPU)
    assert log == ["begin encoder-0 3"]
    windows.end_now()
    windows.begin(CPU)
    assert log == ["begin encoder-0 3", "write 3"] and ended.done()


def test_what_is_open_at_the_end_is_written(log: list[str]) -> None:
    windows = Windows("backbone")
    ended = windows.ask(order(9))
    windows.begin(CPU, 3)
    windows.close()
    windows.close()
    assert log == ["begin backbone 9", "write 9"] and ended.done()


# --- the profiles themselves ------------------------------------------------------------------------------------------


def test_the_profiler_writes_a_trace_of_what_ran(tmp_path: Path) -> None:
    profiles = Profiles(order(1, tmp_path), "backbone", CPU)
    torch.ones(8, 8) @ torch.ones(8, 8)
    profiles.write()
    assert profiles.notes == []
    found = json.loads((tmp_path / "profiler-backbone.json").read_text())
    assert any("mm" in event.get("name", "") for event in found["traceEvents"])


def test_a_profile_that_cannot_be_written_is_noted_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profiles = Profiles(order(1, tmp_path / "gone"), "backbone", CPU)
    with caplog.at_level(logging.WARNING):
        profiles.write()
    (note,) = profiles.notes
    assert note.startswith("profiler-backbone.json could not be written") and note in caplog.text
    again = Profiles(order(1, tmp_path), "backbone", CPU)
    again.write()
    assert again.notes == [], "the profiler is free again"


def test_a_device_without_a_history_of_its_memory_says_so(tmp_path: Path) -> None:
    profiles = Profiles(order(1, tmp_path, profiler=False, memory=True), "backbone", CPU)
    profiles.write()
    assert profiles.notes == [
        "memory-backbone.pickle could not be written: torch keeps no history of allocations on the device 'cpu'"
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_full", [False, True])
def test_a_snapshot_of_memory_is_written_and_the_history_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    calls: list[Any] = []

    def dump(path: str) -> None:
        if is_full:
            raise OSError(28, "No space left on device")
        Path(path).write_bytes(b"snapshot")

    memory = SimpleNamespace(
        _record_memory_history=lambda **options: calls.append(options.get("enabled", "all")), _dump_snapshot=dump
    )
    monkeypatch.setattr(profiles_module.torch, "get_device_module", lambda device: SimpleNamespace(memory=memory))
    profiles = Profiles(order(1, tmp_path, profiler=False, memory=True), "encoder-0", CPU)
    assert calls == ["all"]
    profiles.write()
    assert calls == ["all", None], "history is kept no longer, also if the disk is full"
    assert [path.name for path in tmp_path.iterdir()] == ([] if is_full else ["memory-encoder-0.pickle"])
    assert len(profiles.notes) == is_full
