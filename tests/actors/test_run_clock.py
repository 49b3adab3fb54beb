"""The run's clock in actors: one clock on the coordinator's node, a measured offset elsewhere."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from flowtrain.actors import run_clock as run_clock_module
from flowtrain.actors.link import CoordinatorLink
from flowtrain.actors.run_clock import MEASURE_EVERY_S, ROUND_TRIPS, RunClock
from flowtrain.actors.spans import SpanLog
from flowtrain.observability.clocks import monotonic_clock_name
from flowtrain.types.tracing import ClockReading

EPOCH_S = 1e9


class Coordinator(CoordinatorLink):
    """Answers with a clock that is ahead of this process's, after a delay each way."""

    def __init__(self, name: str, ahead_s: float = 0.0) -> None:
        self._name, self.ahead_s = name, ahead_s
        self.num_asked = 0
        self.now_s = 50.0

    @property
    def node_id(self) -> str:
        return "elsewhere"

    def ask(self, question: Any, *args: Any, **kwargs: Any) -> Any:
        assert question.__name__ == "clock"
        self.num_asked += 1
        self.now_s += 0.002
        reading = ClockReading(self._name, self.now_s + self.ahead_s, EPOCH_S)
        self.now_s += 0.002
        return reading


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Coordinator:
    coordinator = Coordinator("another node", ahead_s=700.0)
    clock = SimpleNamespace(monotonic=lambda: coordinator.now_s, time=time.time)
    monkeypatch.setattr(run_clock_module, "time", clock)
    return coordinator


def test_on_the_coordinators_node_nothing_is_measured() -> None:
    coordinator = Coordinator(monotonic_clock_name(), ahead_s=700.0)
    clock = RunClock()
    clock.follow(coordinator)
    assert coordinator.num_asked == 1
    assert clock.of(12.5) == EPOCH_S + 12.5


def test_on_another_node_the_offset_is_measured_within_half_of_a_round_trip(elsewhere: Coordinator) -> None:
    clock = RunClock()
    clock.follow(elsewhere)
    assert elsewhere.num_asked == 1 + ROUND_TRIPS
    assert clock.of(60.0) == pytest.approx(EPOCH_S + 60.0 + 700.0, abs=0.002 + 1e-6)


def test_it_is_measured_again_when_the_clocks_may_have_moved_apart(elsewhere: Coordinator) -> None:
    clock = RunClock()
    clock.follow(elsewhere)
    clock.refresh()
    assert elsewhere.num_asked == 1 + ROUND_TRIPS, "it is known well enough"
    elsewhere.now_s += MEASURE_EVERY_S
    elsewhere.ahead_s += 0.01
    clock.refresh()
    assert elsewhere.num_asked == 1 + 2 * ROUND_TRIPS
    at_s = elsewhere.now_s
    assert clock.of(at_s) == pytest.approx(EPOCH_S + at_s + elsewhere.ahead_s, abs=0.002 + 1e-6)


def test_spans_are_reported_on_the_runs_clock(elsewhere: Coordinator) -> None:
    spans = SpanLog("encoder-0")
    spans.follow(elsewhere)
    spans.add("encode", 51.0, 52.0, produces=[3, 4], images=2)
    offset, span = spans.take()
    assert offset.name == "clock_offset"
    assert offset.args["offset_s"] == pytest.approx(700.0, abs=0.003) and 0 < offset.args["error_s"] <= 0.003  # type: ignore[operator]
    assert (span.produces, span.consumes, span.args) == ((3, 4), (), {"images": 2})
    assert span.start_s == pytest.approx(EPOCH_S + 751.0, abs=0.003)
    assert span.end_s - span.start_s == pytest.approx(1.0)


def test_a_log_that_is_off_keeps_nothing() -> None:
    spans = SpanLog("encoder-0")
    spans.is_on = False
    spans.add("encode", 1.0, 2.0)
    spans.is_on = True
    spans.add("put", 2.0, 3.0)
    assert [span.name for span in spans.take()] == ["put"]
