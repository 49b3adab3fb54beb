"""What Ray's metrics get, over stand-ins that check as Ray does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from flowtrain.observability import ray_sink
from flowtrain.observability.callback import deliver
from flowtrain.observability.lasting_gauges import LastingGauges, SettableGauge
from flowtrain.types.metrics import PoolUse
from flowtrain.types.run_events import StepFinished
from tests.observability.events import CHECKPOINT, ENDED, EVALUATED, QUARANTINED, RESTARTED, started

Series = tuple[str, frozenset[tuple[str, str]]]


class Metrics:
    """The values of all series, by name and by the tags that are not empty."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.values: dict[Series, float] = {}
        self.observed: list[float] = []
        self.names: set[str] = set()
        outer = self

        class FakeMetric:
            def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
                assert description and name not in outer.names
                self.name, self.tag_keys = name, tag_keys
                outer.names.add(name)

            def series(self, tags: dict[str, str]) -> Series:
                assert set(tags) == set(self.tag_keys), (self.name, tags)
                assert all(isinstance(value, str) for value in tags.values())
                return self.name.removeprefix("flowtrain_"), frozenset((k, v) for k, v in tags.items() if v)

        class FakeGauge(FakeMetric):
            def set(self, value: float | None, tags: dict[str, str]) -> None:
                if value is not None:
                    assert isinstance(value, int | float)
                    outer.values[self.series(tags)] = value

        class FakeCounter(FakeMetric):
            def inc(self, value: float, tags: dict[str, str]) -> None:
                assert value > 0, "as Ray"
                self._record(value, tags)

            def _record(self, value: float, tags: dict[str, str]) -> None:
                outer.values[self.series(tags)] = outer.values.get(self.series(tags), 0.0) + value

        class FakeHistogram(FakeMetric):
            def __init__(self, name: str, text: str, boundaries: list[float], tag_keys: tuple[str, ...]) -> None:
                super().__init__(name, text, tag_keys)
                assert boundaries == sorted(boundaries) and boundaries[0] > 0, "as Ray"

            def observe(self, value: float, tags: dict[str, str]) -> None:
                self.series(tags)
                outer.observed.append(value)

        monkeypatch.setattr(ray_sink, "Gauge", FakeGauge)
        monkeypatch.setattr(ray_sink, "Counter", FakeCounter)
        monkeypatch.setattr(ray_sink, "Histogram", FakeHistogram)

    def of(self, name: str, **tags: str) -> float | None:
        return self.values.get((name, frozenset({"run": "small", **tags}.items())))


@pytest.fixture(autouse=True)
def lasting(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LastingGauges]]:
    """The gauges of each sink; their threads end with the test."""
    found: list[LastingGauges] = []

    class Noted(LastingGauges):
        def __init__(self, gauges: Mapping[str, SettableGauge]) -> None:
            super().__init__(gauges)
            found.append(self)

        def set(self, name: str, value: float | None, tags: Mapping[str, str]) -> None:
            super().set(name, value, tags)
            self.show()  # no test waits for the thread

    monkeypatch.setattr(ray_sink, "LastingGauges", Noted)
    yield found
    for gauges in found:
        gauges.close()


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> Metrics:
    return Metrics(monkeypatch)


def test_every_documented_metric_is_set_with_the_runs_name(metrics: Metrics, make_metrics: Any) -> None:
    sink = ray_sink.RayMetricsSink()
    step = make_metrics(
        4,
        mfu=0.5,
        skipped=True,
        source_losses={"cats": 0.125},
        slot_imbalance=(0.0, 0.5),
        lookahead_steps=2,
        read_nbytes_by_transport={"nixl": 7},
        retries=3,
        pool=(PoolUse("encoder", "1", "dram", 5, 10), PoolUse("feeder", None, "dram", 1, 4)),
        timestamp=99.0,
    )
    for event in (started(), StepFinished(metrics=step), EVALUATED, CHECKPOINT, RESTARTED, QUARANTINED):
        deliver(sink, event)
    documented = {*ray_sink.GAUGES, *ray_sink.COUNTERS, *ray_sink.HISTOGRAMS}
    assert metrics.names == {f"flowtrain_{name}" for name in documented}
    assert {name for name, _ in metrics.values} | {"slot_imbalance_ratio"} == documented
    assert all(dict(tags)["run"] == "small" for _, tags in metrics.values)
    assert {name: value for name, tags in metrics.values if (value := metrics.of(name)) is not None} == {
        "step": 4,
        "num_steps": 4,
        "loss": 0.25,
        "learning_rate": 1e-4,
        "gradient_norm": 0.5,
        "tokens_per_second": 2000.0,
        "tokens_per_second_per_device": 1000.0,
        "mfu_ratio": 0.5,
        "produced_samples_per_second": 4.0,
        "consumed_samples_per_second": 4.0,
        "step_seconds": 2.0,
        "starved_seconds": 0.5,
        "blocked_seconds": 0.1,
        "fetch_seconds": 0.05,
        "plan_seconds": 0.01,
        "plan_wait_seconds": 0.002,
        "checkpoint_seconds": 0.25,
        "lookahead_steps": 2,
        "packing_fill_ratio": 0.9,
        "step_imbalance_ratio": 1.1,
        "last_step_timestamp_seconds": 99.0,
        "retries": 3,
        "quarantined": 1,
        "skipped_steps": 1,
    }
    assert metrics.of("source_loss", source="cats") == 0.125
    assert metrics.of("eval_loss", set="held-out") == 0.5
    assert metrics.of("read_bytes", transport="nixl") == 7
    assert metrics.of("restarts", role="encoder") == 1
    assert metrics.observed == [0.0, 0.5]
    of_encoder = {"role": "encoder", "rank": "1", "tier": "dram"}
    assert metrics.of("pool_used_bytes", **of_encoder) == 5 and metrics.of("pool_bound_bytes", **of_encoder) == 10
    assert metrics.of("pool_occupancy_ratio", **of_encoder) == 0.5
    assert metrics.of("pool_occupancy_ratio", role="feeder", tier="dram") == 0.25


def test_counters_are_there_from_the_start_and_add_up(metrics: Metrics, make_metrics: Any) -> None:
    sink = ray_sink.RayMetricsSink()
    sink.on_run_start(started(step=3, num_steps=9))
    assert metrics.of("step") == 3 and metrics.of("num_steps") == 9
    assert [metrics.of(name) for name in ("retries", "quarantined", "skipped_steps")] == [0, 0, 0]
    assert metrics.of("restarts", role="feeder") == 0
    for step in (4, 5):
        read = {"local": 2, "nixl": 0}
        sink.on_step(StepFinished(metrics=make_metrics(step, retries=step - 4, read_nbytes_by_transport=read)))
    assert metrics.of("retries") == 1 and metrics.of("read_bytes", transport="local") == 4
    assert metrics.of("read_bytes", transport="nixl") is None, "nothing was read by it"


def test_what_is_not_known_keeps_its_value_and_what_is_gone_becomes_zero(metrics: Metrics, make_metrics: Any) -> None:
    sink = ray_sink.RayMetricsSink()
    sink.on_run_start(started())
    use = PoolUse("encoder", "0", "hbm", 5, 10)
    for step, changes in ((1, {"mfu": 0.5, "pool": (use,)}), (2, {})):
        sink.on_step(StepFinished(metrics=make_metrics(step, **changes)))
    assert metrics.of("mfu_ratio") == 0.5
    gone = {"role": "encoder", "rank": "0", "tier": "hbm"}
    assert metrics.of("pool_used_bytes", **gone) == metrics.of("pool_occupancy_ratio", **gone) == 0


def test_metrics_of_emulated_devices_say_so(metrics: Metrics, make_metrics: Any) -> None:
    sink = ray_sink.RayMetricsSink()
    sink.on_run_start(started(device="emulated h200", emulated=True))
    sink.on_step(StepFinished(metrics=make_metrics(1, emulated="emulated h200")))
    assert metrics.of("loss", emulated="emulated h200") == 1.0 and metrics.of("loss") is None


def test_gauges_last_until_the_end_of_the_run(metrics: Metrics, lasting: list[LastingGauges]) -> None:
    sink = ray_sink.RayMetricsSink()
    deliver(sink, started())
    (gauges,) = lasting
    assert gauges._thread is not None and gauges._thread.is_alive()
    deliver(sink, ENDED)
    assert not gauges._thread.is_alive()


def test_what_is_counted_before_the_start_counts(metrics: Metrics) -> None:
    sink = ray_sink.RayMetricsSink()
    for event in (QUARANTINED, RESTARTED):  # while models are still loaded
        deliver(sink, event)
    assert metrics.values == {}, "the run's name is not known yet"
    deliver(sink, started())
    assert metrics.of("quarantined") == 1 and metrics.of("restarts", role="encoder") == 1
    deliver(sink, QUARANTINED)
    assert metrics.of("quarantined") == 2
