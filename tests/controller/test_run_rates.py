"""Rates over the steps of a start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flowtrain.controller.run_rates import RunRates


def rates_of(*steps: tuple[int, float, float | None], time_scale: float = 1.0) -> RunRates:
    rates = RunRates(time_scale)
    for num_tokens, step_time_s, host_s in steps:
        metrics: Any = SimpleNamespace(num_tokens=num_tokens, step_time_s=step_time_s, host_s=host_s)
        rates.take(metrics)
    return rates


def test_the_first_step_is_left_out() -> None:
    one = rates_of((100, 60.0, None))
    assert (one.tokens_per_s, one.host_share) == (None, None)
    three = rates_of((100, 60.0, None), (100, 1.0, None), (200, 2.0, None))
    assert (three.tokens_per_s, three.host_share) == (100.0, None)


def test_the_hosts_work_is_a_share_of_this_machines_time() -> None:
    rates = rates_of((100, 60.0, 9.0), (100, 1.0, 0.5), (100, 1.0, 1.5), time_scale=4.0)
    assert rates.host_share == pytest.approx(2.0 / 8.0) and rates.tokens_per_s == 100.0
