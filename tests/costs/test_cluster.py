"""Device types by data sheet: unknown devices are refused."""

from __future__ import annotations

import pytest

from flowtrain.costs.cluster import data_sheet_device_type
from flowtrain.errors import ConfigError


@pytest.mark.parametrize("name", ["h300", "NVIDIA H200 MIG 1g.18gb"])
def test_an_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"--device \(.*\) is not in the table of devices; take one of b200, "):
        data_sheet_device_type(name, 8)


def test_a_device_without_a_peak_in_float32_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--device \(910b\) has no public peak for model.dtype \(float32\)"):
        data_sheet_device_type("910b", 8, dtype="float32")
