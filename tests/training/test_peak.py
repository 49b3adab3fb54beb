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
