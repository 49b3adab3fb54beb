"""Spans of a device's work, on a device that a test drives: nothing waits for it, and times are bounded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.training import work_spans as module
from flowtrain.training.work_spans import WorkSpans

Recorded = list[tuple[str, float, float, dict[str, Any]]]


class Device:
    """A host that launches work and a device that runs it in order; both on one true clock, in seconds.

    Its events tell times from an origin that the host does not know.
    """

    ORIGIN_S = 7777.0
    type = "fake"

    def __init__(self) -> None:
        self.now_s = 100.0
        self.busy_until_s = 0.0
        self.num_waits = 0

    def launch(self, host_s: float, device_s: float) -> None:
        """Take the host so long; the device computes so long once it is free."""
        self.now_s += host_s
        self.busy_until_s = max(self.busy_until_s, self.now_s) + device_s

    def wait(self) -> None:
        """The host waits for the device for a reason of its own."""
        self.now_s = max(self.now_s, self.busy_until_s)


class Event:
    device: Device

    def __init__(self, device: Any, enable_timing: bool = False) -> None:
        assert enable_timing
        self.device = device

    def record(self) -> None:
        self.at_s = max(self.device.busy_until_s, self.device.now_s)

    def query(self) -> bool:
        return self.at_s <= self.device.now_s

    def synchronize(self) -> None:
        raise AssertionError("no span waits for the device")

    def elapsed_time(self, other: Event) -> float:
        assert self.query() and other.query(), "torch refuses to tell it before"
        return 1000.0 * ((other.at_s - Device.ORIGIN_S) - (self.at_s - Device.ORIGIN_S))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return driven(monkeypatch)


def driven(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(module.torch, "Event", Event)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: device.now_s))
    return device


def spans_on(device: Device) -> tuple[WorkSpans, Recorded]:
    recorded: Recorded = []

    def record(name: str, start_s: float, end_s: float, **args: Any) -> None:
        recorded.append((name, start_s, end_s, args))

    return WorkSpans(device, record), recorded  # type: ignore[arg-type]  # what it needs of one


def test_on_a_cpu_a_span_is_there_at_once_with_what_it_says() -> None:
    recorded: Recorded = []
    spans = WorkSpans(torch.device("cpu"), lambda *span, **args: recorded.append((*span, args)))  # type: ignore[arg-type]
    with spans.span("encode", produces=[1, 2], images=3):
        pass
    ((name, start_s, end_s, args),) = recorded
    assert name == "encode" and start_s <= end_s
    assert args == {"produces": [1, 2], "consumes": (), "images": 3}
    spans.caught_up()
    spans.collect()
    assert len(recorded) == 1


def test_work_that_the_device_has_not_done_comes_with_a_later_call(device: Device) -> None:
    spans, recorded = spans_on(device)
    with spans.span("forward", microbatch=0):
        device.launch(0.001, 5.0)
    spans.collect()
    assert recorded == [] and device.now_s < 101.0, "the host has not waited"
    device.wait()
    spans.collect()
    ((name, start_s, end_s, args),) = recorded
    assert (name, args["microbatch"]) == ("forward", 0)
    assert end_s - start_s == pytest.approx(5.001)
    spans.collect()
    assert len(recorded) == 1, "a span comes once"


def test_what_the_host_launches_ahead_is_shown_where_the_device_does_it(device: Device) -> None:
    spans, recorded = spans_on(device)
    for number in range(3):
        with spans.span("forward", number=number):
            device.launch(0.001, 2.0)
    device.wait()
    spans.caught_up()
    spans.collect()
    starts = [start_s for _, start_s, _, _ in recorded]
    assert starts == pytest.approx([100.0, 102.001, 104.001], abs=0.002)


def test_spans_that_are_off_cost_no_event(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    spans, recorded = spans_on(device)
    with spans.span("forward"):
        device.launch(0.001, 1.0)
    spans.is_on = False
    monkeypatch.setattr(module.torch, "Event", None)
    with spans.span("forward"):
        device.launch(0.001, 1.0)
    spans.add("forward", 1.0, 2.0)
    device.wait()
    spans.collect()
    assert len(recorded) == 1, "what was begun before is still collected"


def test_without_a_recorder_nothing_is_timed() -> None:
    spans = WorkSpans(torch.device("cpu"), None)
    assert not spans.is_on
    with spans.span("forward"):
        pass


def test_work_that_raises_has_no_span(device: Device) -> None:
    spans, recorded = spans_on(device)
    with pytest.raises(RuntimeError), spans.span("forward"):
        raise RuntimeError("out of device memory")
    spans.collect()
    assert recorded == []


steps = st.lists(
    st.tuples(st.floats(0.0, 0.1), st.floats(0.0, 2.0), st.sampled_from(["go on", "wait", "collect", "compare"])),
    min_size=1,
    max_size=25,
)


@given(steps)
def test_times_are_wrong_by_at_most_what_the_host_could_not_see(steps: list[tuple[float, float, str]]) -> None:
    """A span is as long as it was, and is placed between its launch and the moment that the host saw its end."""
    with pytest.MonkeyPatch.context() as patch:
        device = driven(patch)
        spans, recorded = spans_on(device)
        truth: list[tuple[float, float]] = []
        launched: list[float] = []
        seen: list[float] = []
        for host_s, device_s, then in steps:
            launched.append(device.now_s)
            start_s = max(device.now_s, device.busy_until_s)
            with spans.span("work"):
                device.launch(host_s, device_s)
            truth.append((start_s, device.busy_until_s))
            if then == "wait":
                device.wait()
                spans.caught_up()
            elif then == "compare":
                spans.caught_up()
            elif then == "collect":
                spans.collect()
            seen += [device.now_s] * (len(recorded) - len(seen))
        device.wait()
        spans.collect()
        seen += [device.now_s] * (len(recorded) - len(seen))
    assert len(recorded) == len(truth)
    for (_, start_s, end_s, _), (true_start_s, true_end_s), at_s, seen_s in zip(
        recorded, truth, launched, seen, strict=True
    ):
        assert end_s - start_s == pytest.approx(true_end_s - true_start_s, abs=1e-6)
        assert at_s - 1e-6 <= start_s <= end_s <= seen_s + 1e-6
