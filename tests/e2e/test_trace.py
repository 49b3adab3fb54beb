"""The traces of real runs: arrows, counters, restarts, one clock; and windows that another process asks for."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import flowtrain
from flowtrain.actors.encoder import Encoder, Work
from flowtrain.config.run import RunConfig
from flowtrain.controller.run import run_training
from flowtrain.controller.worker_group import ActorClasses
from flowtrain.observability.run_dir import run_dir
from flowtrain.observability.trace import read_events, read_spans
from tests.e2e.disturbed import json_lines
from tests.e2e.processes import driver
from tests.e2e.worlds import World, tiny_config

pytestmark = pytest.mark.e2e

ENDLESS = 100_000


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("traced")
    world = World()
    world.add_mixed(64)
    world.write(directory / "train.parquet")
    return directory


def config_of(data: Path, name: str, *overrides: str) -> RunConfig:
    return tiny_config(data, data / "train.parquet", name, *overrides)


def events_of(path: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(path) if event["ph"] == kind]


def check_arrows(path: Path) -> None:
    """Every arrow leads from an encode to a forward that starts after it."""
    spans = {(event["pid"], event["tid"], event["ts"]): event for event in events_of(path, "X")}
    starts = {event["id"]: event for event in events_of(path, "s")}
    ends = {event["id"]: event for event in events_of(path, "f")}
    assert starts and starts.keys() == ends.keys()
    for number, start in starts.items():
        source, target = (spans[each["pid"], each["tid"], each["ts"]] for each in (start, ends[number]))
        assert (source["name"], target["name"]) == ("encode", "forward")
        assert source["ts"] + source["dur"] <= target["ts"], "one clock: features are there before they are consumed"


def test_a_trace_has_arrows_counters_and_one_clock(data: Path, ray_cluster: None) -> None:
    began_s = time.time()
    config = config_of(data, "traced", "backbone.pipeline_parallel_size=2")
    run_training(config)
    path = run_dir(config).trace
    assert "traceEvents" in json.loads(path.read_text())
    check_arrows(path)
    names = {span.name for span in read_spans(path)}
    assert {"size", "pack", "fetch", "decode", "encode", "put", "forward", "backward", "optimizer"} <= names
    assert all(began_s - 1 < span.start_s <= span.end_s < time.time() + 1 for span in read_spans(path))
    counters = events_of(path, "C")
    assert {event["name"] for event in counters} == {"pool dram", "units sized ahead", "units encoded ahead"}
    assert all(value >= 0 for event in counters for value in event["args"].values())
    # Images of every sample are encoded once, and consumed once.
    consumers = {event["id"] for event in events_of(path, "f")}
    assert len(consumers) >= sum(span.name == "encode" for span in read_spans(path))


class DyingEncoder(Encoder):
    """encoder-0 dies once with a batch on its hands."""

    def encode(self, work: Work) -> Any:
        mark = Path(self._config.runs_dir) / "died"
        if self._name == "encoder-0" and work.lease.batch.unit == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(work)


def test_a_death_is_a_restart_in_the_trace(data: Path, ray_cluster: None) -> None:
    config = config_of(data, "restarted", "training.max_steps=6", "encoders.vision.data_parallel_size=1")
    run_training(config, classes=ActorClasses(encoder=DyingEncoder))
    path = run_dir(config).trace
    (restart,) = [span for span in read_spans(path) if span.name == "restart"]
    assert restart.actor == "encoder-0" and restart.end_s > restart.start_s
    (told,) = [line for line in json_lines(run_dir(config).events) if line["event"] == "restart"]
    assert told["name"] == "encoder-0" and told["down_s"] == pytest.approx(restart.end_s - restart.start_s, abs=1e-3)
    check_arrows(path)


def test_any_steps_are_traced_on_demand_and_the_run_computes_the_same(data: Path) -> None:
    config = config_of(data, "windows", f"training.max_steps={ENDLESS}", "observability.trace.steps=2")
    run = run_dir(config)
    with driver(config, data / "windows.log") as disturbed:
        disturbed.wait_until(lambda: disturbed.num_steps >= 4, "the first steps")
        first = flowtrain.trace(run.root, 5)
        second = flowtrain.trace(run.root, 3, profiler=True, memory=True)
        os.kill(disturbed.pid, signal.SIGINT)
        disturbed.wait()
    assert 4 < first.first_step <= first.last_step == first.first_step + 4 < second.first_step
    for window in (first, second):
        check_arrows(window.files[0])
        assert {"forward", "backward", "optimizer", "encode"} <= {span.name for span in read_spans(window.files[0])}
        steps = {span.args["step"] for span in read_spans(window.files[0]) if span.name == "size"}
        assert steps and max(steps) >= window.first_step
    names = {path.name for path in second.files}
    assert names == {
        "trace.json",
        "profiler-backbone-dp0-pp0-tp0.json",
        "profiler-encoder-0.json",
        "profiler-encoder-1.json",
    }
    assert second.note is not None and "torch keeps no history of allocations on the device 'cpu'" in second.note
    assert first.note is None and "Traceback" not in disturbed.log.read_text()
    plain = config_of(data, "plain", "training.max_steps=12", "observability.trace.steps=0")
    with driver(plain, data / "plain.log") as untraced:
        assert untraced.wait() == 0, untraced.report("it failed")
    losses = [line["loss"] for line in json_lines(run_dir(plain).metrics)]
    assert [line["loss"] for line in json_lines(run.metrics)][:12] == losses
    assert events_of(run_dir(plain).trace, "X") == []
