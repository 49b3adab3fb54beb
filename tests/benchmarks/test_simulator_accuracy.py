"""The simulator's accuracy: which runs count is decided by the machine's speed alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import simulator_accuracy
from _simulator_accuracy import Case, Ran
from simulator_accuracy import MOST_ROUNDS, quiet
from simulator_accuracy import test_rates as rates_of

from flowtrain.types.plan import Degrees


def ran(machine_s: float, step_s: float = 1.0) -> Ran:
    return Ran((1,), (step_s,), Path("run"), machine_s)


def test_runs_on_a_slower_machine_do_not_count() -> None:
    fast, near, slow = ran(1.0), ran(1.05), ran(1.06, step_s=0.5)
    assert quiet([slow, near, fast]) == [near, fast]
    assert quiet([]) == [] and quiet([slow]) == [slow]


@pytest.mark.parametrize(
    ("machine_s", "taken", "counted"),
    [([1.0] * 4, 2, 2), ([1.0, 1.2, 1.0, 1.0], 3, 2), ([1.2, 1.2, 1.0, 1.0], 2, 2), ([1.0, 1.2, 1.2, 1.2], 4, 1)],
)
def test_others_take_their_place(
    monkeypatch: pytest.MonkeyPatch, machine_s: list[float], taken: int, counted: int
) -> None:
    rounds = 2
    assert len(machine_s) == MOST_ROUNDS * rounds
    speeds = iter(machine_s)
    monkeypatch.setattr(simulator_accuracy, "measured_profile", lambda *_: None)
    monkeypatch.setattr(simulator_accuracy, "config_of", lambda *_: None)
    monkeypatch.setattr(simulator_accuracy, "predicted_rate", lambda *_: 1.0)
    monkeypatch.setattr(simulator_accuracy, "run", lambda *_: ran(next(speeds)))
    case = Case("decoupled", "decoupled", Degrees())
    workloads: dict = {"ai2d": None}
    (tested,) = rates_of("model", workloads, [case], 10, rounds, Path("profile"))
    assert len(tested.runs) == counted and len(machine_s) - len(list(speeds)) == taken
