"""Predicted memory of a step against the tensors that four ranks hold."""

from __future__ import annotations

import pytest
from shared.step_memory import CASES, Measured, measure

# Four ranks compute in bfloat16, which CPUs without it emulate slowly.
pytestmark = [pytest.mark.processes, pytest.mark.timeout(1500)]

DAILY = ("trained encoder, pp 2, mixed",)
"""A case takes a minute."""


class Once:
    """Cases, each measured when it is asked for first."""

    def __init__(self) -> None:
        self._found: dict[str, list[Measured]] = {}

    def __getitem__(self, name: str) -> list[Measured]:
        """The four ranks of a case."""
        if name not in self._found:
            self._found |= measure([CASES[name]])
        return self._found[name]


@pytest.fixture(scope="module")
def measured() -> Once:
    return Once()


@pytest.mark.parametrize(
    "name", [name if name in DAILY else pytest.param(name, marks=pytest.mark.nightly) for name in CASES]
)
def test_the_peak_is_predicted(name: str, measured: Once) -> None:
    predicted = CASES[name].predicted()
    fullest = max(each.device for each in measured[name])
    assert predicted.peak == pytest.approx(fullest, rel=0.10)
    assert predicted.host == pytest.approx(max(each.host for each in measured[name]), rel=0.02)


@pytest.mark.nightly
def test_what_saves_memory_does(measured: Once) -> None:
    peak = {name: max(each.device for each in measured[name]) for name in CASES}
    assert peak["microbatch"] < peak["step"] and peak["hybrid microbatch"] < peak["hybrid step"]
    assert peak["tp 2"] < peak["tp 2, tokens whole"] and peak["tp 4"] < peak["tp 4, tokens whole"]
    assert peak["offloaded"] < peak["microbatch"] and peak["tp 2, offloaded"] < peak["tp 2"]
