"""The trace of a run of one rank, coordinator, feeder and encoder as threads; the encoder has a clock of its own."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest

from flowtrain.actors.backbone import BackboneRank
from flowtrain.actors.encoder import Encoder
from flowtrain.actors.feeder import Feeder
from flowtrain.controller.prepare import first_flow_settings, prepare
from flowtrain.controller.run_traces import RunTraces
from flowtrain.flow.api import CoordinatorApi
from flowtrain.flow.build import build_flow
from flowtrain.observability.run_dir import RunDir
from flowtrain.observability.trace import read_events, read_spans
from flowtrain.training.checkpoint_store import probe_directory
from flowtrain.training.mesh import LOOPBACK
from flowtrain.types.plan import Degrees, StateOrigin
from flowtrain.types.tracing import ClockReading, TraceOrder
from tests.actors.local import Background, LocalLink, local_coordinator
from tests.actors.scripted import new_run_id
from tests.e2e.worlds import World, tiny_config

NUM_STEPS, TRACED, BATCH = 5, 3, 4
AHEAD_S = 4321.0


class Elsewhere(LocalLink):
    """The link of an actor on another node, whose monotonic clock is behind the coordinator's."""

    def __init__(self, link: LocalLink) -> None:
        super().__init__(link._coordinator, link._loop)

    def ask(self, question: Any, *args: Any, **kwargs: Any) -> Any:
        answer = super().ask(question, *args, **kwargs)
        if isinstance(answer, ClockReading):
            return ClockReading("another node", answer.now_s + AHEAD_S, answer.epoch_s - AHEAD_S)
        return answer


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    directory = tmp_path_factory.mktemp("traced")
    world = World(seed=1)
    world.add_mixed(NUM_STEPS * BATCH)
    config = tiny_config(
        directory,
        world.write(directory / "train.parquet"),
        "traced",
        data={"shuffle": False},
        training={"global_batch_size": BATCH, "max_steps": NUM_STEPS},
        checkpoint={"every_steps": 100, "at_end": False},
        observability={"trace": {"steps": TRACED}},
    )
    spec, run_id = prepare(config), new_run_id()
    settings = replace(first_flow_settings(spec), last_traced_step=TRACED)
    probe_directory(directory, run_id).mkdir(parents=True)
    files = RunDir(directory)
    traces = RunTraces(files, num_done=0, num_steps=TRACED)
    with local_coordinator(lambda: build_flow(config, spec.model_spec, settings)) as link:
        encoder = Encoder(config, "vision", "encoder-0", run_id)
        rank = BackboneRank(config, 0, Degrees(), "backbone-dp0-pp0-tp0", spec.num_steps, run_id)
        order = TraceOrder(2, str(directory), profiler=True, memory=False)
        ended = [Background(rank.trace, order)]
        feeder = Feeder(config, run_id, spec.indexes, 0, 1, spec.plan.feeder.segment_nbytes)
        producers = [Background(feeder.run, link), Background(encoder.run, Elsewhere(link))]
        rank.start(LOOPBACK, 0, StateOrigin(), spec.evaluations, None)
        rank.run(link, 0, 0, str(directory), run_id, TRACED)
        for each in [*producers, *ended]:
            assert each.join() in (None, ()), "nothing failed"
        for event in link.ask(CoordinatorApi.events):
            traces.take(event)
    traces.close()
    return files


def test_the_traced_steps_are_there_and_no_others(files: RunDir) -> None:
    spans = read_spans(files.trace)
    names = {"size", "pack", "fetch", "decode", "encode", "put", "forward", "backward", "optimizer", "clock_offset"}
    assert {span.name for span in spans} == names
    assert sum(span.name == "optimizer" for span in spans) == TRACED
    json.loads(files.trace.read_text())


def test_arrows_lead_forward_in_time_on_one_clock(files: RunDir) -> None:
    events = read_events(files.trace)
    spans = {(event["pid"], event["tid"], event["ts"]): event for event in events if event["ph"] == "X"}
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert len(starts) >= TRACED and starts.keys() == ends.keys()
    (error_s,) = {event["args"]["error_s"] for event in spans.values() if event["name"] == "clock_offset"}
    for number, start in starts.items():
        source, target = (spans[each["pid"], each["tid"], each["ts"]] for each in (start, ends[number]))
        assert (source["name"], target["name"]) == ("encode", "forward")
        assert source["ts"] + source["dur"] <= target["ts"] + 1e6 * error_s + 1.0


def test_the_encoders_offset_is_measured_and_its_times_are_the_coordinators(files: RunDir) -> None:
    spans = read_spans(files.trace)
    (offset,) = [span for span in spans if span.name == "clock_offset"]
    assert offset.actor == "encoder-0"
    assert abs(float(offset.args["offset_s"]) - AHEAD_S) <= float(offset.args["error_s"])
    assert all(abs(span.start_s - time.time()) < 600.0 for span in spans), "not one is hours away"


def test_counters_show_segments_and_lookahead(files: RunDir) -> None:
    counters = [event for event in read_events(files.trace) if event["ph"] == "C"]
    assert {event["name"] for event in counters} == {"pool dram", "units sized ahead", "units encoded ahead"}
    assert all(value >= 0 for event in counters for value in event["args"].values())
    used = [event["args"]["used bytes"] for event in counters if event["name"] == "pool dram"]
    assert max(used) > 0


def test_the_profile_has_the_steps_that_were_asked_for(files: RunDir) -> None:
    (path,) = files.root.glob("profiler-*.json")
    assert path.name == "profiler-backbone-dp0-pp0-tp0.json"
    names = [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]]
    assert any("Optimizer.step" in name for name in names)
