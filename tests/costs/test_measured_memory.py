"""Predicted memory of a step against the tensors that four ranks hold."""

from __future__ import annotations

import pytest
from shared.step_memory import CASES, Measured, measure

pytestmark = pytest.mark.timeout(1500)  # four ranks compute in bfloat16, which CPUs without it emulate slowly


@pytest.fixture(scope="module")
def measured() -> dict[str, list[Measured]]:
    return measure(list(CASES.values()))


@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_predicted(name: str, measured: dict[str, list[Measured]]) -> None:
    predicted = CASES[name].predicted()
    fullest = max(each.device for each in measured[name])
    assert predicted.peak == pytest.approx(fullest, rel=0.10)
    assert predicted.host == pytest.approx(max(each.host for each in measured[name]), rel=0.02)


def test_what_saves_memory_does(measured: dict[str, list[Measured]]) -> None:
    peak = {name: max(each.device for each in ranks) for name, ranks in measured.items()}
    assert peak["microbatch"] < peak["step"] and peak["hybrid microbatch"] < peak["hybrid step"]
    assert peak["tp 2"] < peak["tp 2, tokens whole"] and peak["tp 4"] < peak["tp 4, tokens whole"]
    assert peak["offloaded"] < peak["microbatch"] and peak["tp 2, offloaded"] < peak["tp 2"]
