from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from flowtrain.observability.lasting_gauges import LastingGauges

LIMIT_S = 30.0
RUN = {"run": "one"}


class FakeGauge:
    """Counts its values, and wakes who waits for them."""

    def __init__(self) -> None:
        self.seen: Counter[tuple[float, str]] = Counter()
        self.changed = threading.Condition()
        self.error: Exception | None = None

    def set(self, value: float, tags: dict[str, str]) -> None:
        with self.changed:
            self.seen[value, tags.get("set", "")] += 1
            self.changed.notify_all()
        if self.error is not None:
            raise self.error

    def wait_for(self, value: float, times: int, which: str = "") -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.seen[value, which] >= times, LIMIT_S)


@pytest.fixture
def step() -> FakeGauge:
    return FakeGauge()


@pytest.fixture
def gauges(step: FakeGauge) -> Iterator[LastingGauges]:
    lasting = LastingGauges({"step": step, "loss": FakeGauge()}, every_s=0.001)
    yield lasting
    lasting.close()


def test_a_value_is_set_again_until_the_next_one(step: FakeGauge, gauges: LastingGauges) -> None:
    gauges.set("step", 1, RUN)
    step.wait_for(1, 5)
    gauges.set("step", 2, RUN)
    step.wait_for(2, 5)
    last = step.seen[1, ""]
    step.wait_for(2, step.seen[2, ""] + 5)
    assert step.seen[1, ""] <= last + 1, "one more may have been on its way"


def test_none_leaves_the_last_value_and_labels_keep_values_apart(step: FakeGauge, gauges: LastingGauges) -> None:
    gauges.set("step", None, RUN)
    assert step.seen == {}
    gauges.set("step", 3, RUN | {"set": "a"})
    gauges.set("step", 4, RUN | {"set": "b"})
    gauges.set("step", None, RUN | {"set": "b"})
    step.wait_for(3, 5, "a")
    step.wait_for(4, 5, "b")


def test_after_the_end_nothing_is_set(step: FakeGauge, gauges: LastingGauges) -> None:
    gauges.close()
    gauges.set("step", 1, RUN)
    assert gauges._thread is None
    gauges.close()
    assert step.seen == {}


def test_close_ends_the_thread(step: FakeGauge, gauges: LastingGauges) -> None:
    gauges.set("step", 1, RUN)
    step.wait_for(1, 3)
    gauges.close()
    assert gauges._thread is not None and not gauges._thread.is_alive()


def test_an_error_ends_the_thread_with_one_warning(
    step: FakeGauge, gauges: LastingGauges, caplog: pytest.LogCaptureFixture
) -> None:
    gauges.set("step", 1, RUN)
    step.error = RuntimeError("Ray is gone")
    assert gauges._thread is not None
    gauges._thread.join(LIMIT_S)
    assert not gauges._thread.is_alive() and caplog.text.count("Ray is gone") == 1
