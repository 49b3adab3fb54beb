from __future__ import annotations

from typing import Any

import pytest

from flowtrain.observability import ray_sink


def test_every_gauge_is_set_under_its_documented_name(make_metrics: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[tuple[str, str], float] = {}
    devices: set[str] = set()

    class FakeGauge:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...] = ()) -> None:
            self._name, self._tag_keys = name, tag_keys

        def set(self, value: float, tags: dict[str, str] | None = None) -> None:
            assert set(tags or {}) == set(self._tag_keys)
            seen[self._name, (tags or {}).get("tier", "")] = value
            devices.add((tags or {})["emulated"])

    monkeypatch.setattr(ray_sink, "Gauge", FakeGauge)
    sink = ray_sink.RayMetricsSink()
    sink.update(make_metrics(4, pool_hbm_nbytes=7))
    assert devices == {""}
    assert seen == {
        ("flowtrain_step", ""): 4,
        ("flowtrain_loss", ""): 0.25,
        ("flowtrain_tokens_per_second", ""): 2000.0,
        ("flowtrain_starved_seconds", ""): 0.5,
        ("flowtrain_blocked_seconds", ""): 0.1,
        ("flowtrain_pool_bytes", "dram"): 1024,
        ("flowtrain_pool_bytes", "hbm"): 7,
    }

    devices.clear()
    sink.update(make_metrics(5, emulated="emulated h200"))
    assert devices == {"emulated h200"}
