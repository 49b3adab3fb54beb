from __future__ import annotations

import pytest
import torch

from flowtrain.training import clock as clock_module
from flowtrain.training.clock import MicrobatchClock

CPU = torch.device("cpu")


def test_stretches_of_a_microbatch_add_up_by_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([1.0, 1.5, 2.0, 4.0, 10.0, 10.25, 20.0, 24.0])
    monkeypatch.setattr(clock_module.time, "thread_time", lambda: next(now))
    clock = MicrobatchClock(CPU)
    for slot in (1, 0, 1, 2):  # a rank may run what is ready first
        with clock.running(slot):
            pass
    assert clock.times() == (2.0, 0.75, 4.0)


class FakeEvent:
    """An event of a device that is behind its host; its time can be read once it was waited for."""

    now_ms = 0.0

    def __init__(self, device: torch.device, enable_timing: bool) -> None:
        assert enable_timing
        self.at_ms: float | None = None
        self.is_done = False

    def record(self) -> None:
        self.at_ms = FakeEvent.now_ms

    def synchronize(self) -> None:
        self.is_done = True

    def elapsed_time(self, end: FakeEvent) -> float:
        assert end.is_done and end.at_ms is not None and self.at_ms is not None
        return end.at_ms - self.at_ms


def test_on_an_accelerator_the_device_is_not_waited_for_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_module.torch, "Event", FakeEvent)
    clock = MicrobatchClock(torch.device("meta"))
    for slot, taken_ms in ((0, 500.0), (1, 250.0), (0, 1000.0)):
        with clock.running(slot):
            FakeEvent.now_ms += taken_ms
    assert clock.times() == (1.5, 0.25)
    assert clock.times() == (1.5, 0.25), "read twice, counted once"
