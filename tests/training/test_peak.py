"""Which peak MFU is taken over."""

from __future__ import annotations

import pytest
import torch

from flowtrain.training import peak


def test_the_peak_is_the_data_sheets_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["NVIDIA H200", "NVIDIA H200", "Ascend910B2", "cpu"])
    monkeypatch.setattr(peak, "device_name", lambda device: next(names))
    monkeypatch.setattr(peak, "measure_peak_flops", lambda device, dtype: 7.0)
    cpu = torch.device("cpu")
    found = [peak.device_peak(cpu, dtype) for dtype in (torch.bfloat16, torch.float32, torch.float32, torch.bfloat16)]
    assert [each.flops for each in found] == [989.5e12, 67e12, 7.0, 7.0], "no sheet gives a 910B's float32"
    assert [each.source.split()[0] for each in found] == ["NVIDIA", "NVIDIA", "measured", "measured"]
    assert found[3].device == "cpu"


def test_a_peak_counts_the_fastest_product_by_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start is busy: other actors take the core, for seconds by the clock, and slow single products down."""
    durations_s = iter([0.5, 0.02, 0.03, 0.02, 0.05] * 2)
    now_s, is_running = 0.0, False

    def thread_time() -> float:
        nonlocal now_s, is_running
        now_s += next(durations_s) if is_running else 1.0
        is_running = not is_running
        return now_s

    monkeypatch.setattr(peak.time, "thread_time", thread_time)
    monkeypatch.setattr(peak.time, "perf_counter", lambda: pytest.fail("a CPU's peak is no matter of the clock"))
    assert peak.measure_peak_flops(torch.device("cpu"), torch.float32, size=8) == pytest.approx(2 * 8**3 / 0.02)
    assert next(durations_s, None) is None
