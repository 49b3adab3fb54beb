"""A run of one rank as threads, through the writers of a run's files: the page and the status read all of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest

from flowtrain.config.load import override_config
from flowtrain.controller.commit import Committer
from flowtrain.controller.cost_keeper import CostKeeper
from flowtrain.controller.following import following, run_started, telling_the_end
from flowtrain.controller.prepare import prepare
from flowtrain.controller.resume import ResumePoint
from flowtrain.controller.run_report import write_report
from flowtrain.controller.run_traces import RunTraces
from flowtrain.controller.signals import StopRequest
from flowtrain.controller.state import Role
from flowtrain.observability.progress import ProgressDisplay
from flowtrain.observability.report.outcome import State
from flowtrain.observability.report.status import status_of
from flowtrain.observability.run_dir import RunDir, held_run_dir, open_run_dir
from flowtrain.types.events import CheckpointWritten
from flowtrain.types.plan import DevicePeak
from tests.actors.test_evaluated import NUM_STEPS, config_of, run
from tests.report.parsed import Node, parsed

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunDir]:
    """Of a run as its driver leaves them; the directory is held, as while it trains, until the tests end."""
    directory = tmp_path_factory.mktemp("written")
    config = override_config(
        config_of(directory, "written", num_generated=2, max_new_tokens=3),
        ["observability.ray_metrics=false", "checkpoint.keep_best=eval_loss/seen"],
    )
    spec, started = prepare(config), time.monotonic()
    with held_run_dir(config):
        found = open_run_dir(config, resume=False)
        found.write_plan(asdict(spec.plan))
        events = run(config, found.checkpoints)
        traces = RunTraces(found, 0, NUM_STEPS)
        with (
            following(spec, found, ResumePoint(), ProgressDisplay("off", NUM_STEPS), ()) as (stream, recorder),
            telling_the_end(stream, recorder, StopRequest(), NUM_STEPS, started),
        ):
            recorder.peak = DevicePeak("cpu", 1e11, "measured")
            costs = CostKeeper(spec, found, None, stream.note)
            costs.start("cpu")
            committer = Committer(spec, found, recorder, costs, stream.warn, stream.emit)
            stream.emit(run_started(spec, found, ResumePoint(), "cpu", [Role.BACKBONE, Role.ENCODER, Role.FEEDER]))
            for event in events:
                recorder.take(event)
                traces.take(event)
                if isinstance(event, CheckpointWritten):
                    committer.commit(event)
            recorder.flush(NUM_STEPS)
        traces.close()
        yield found


@pytest.fixture(scope="module")
def page(files: RunDir, tmp_path_factory: pytest.TempPathFactory) -> Node:
    file = write_report([files.root], tmp_path_factory.mktemp("page") / "page.html", steps=(2, 3))
    return parsed(file.read_text().removeprefix("<!DOCTYPE html>\n"))


def test_every_section_has_something_to_show(page: Node) -> None:
    assert page.all("h1")[0].text == "written done"
    assert [node.text for node in page.all("h2")] == [
        *("At a glance", "Learning", "Generated samples", "Speed", "Flow of data", "Timeline", "Packing and balance"),
        *("Plan and reality", "Data", "Quarantine", "Faults and restarts", "Checkpoints", "Configuration"),
    ]
    shown = {node.text for node in page.all("h3")}
    assert {"Loss", "Gradient norm", "Throughput", "Model FLOPs utilisation", "Pool occupancy", "Imbalance"} <= shown
    assert "cannot be read" not in page.by_id("glance").text


def test_answers_stand_beside_their_pictures(page: Node) -> None:
    cards = page.by_id("samples").all("article")
    assert [card.all("h3")[0].text for card in cards] == ["seen, row 0", "seen, row 1", "text, row 0"]
    assert [len(card.all("img")) for card in cards] == [1, 0, 0]
    assert all("Generated after step 4" in card.text and "after step 2" in card.text for card in cards)


def test_the_timeline_has_the_actors_and_the_steps_that_were_asked_for(page: Node) -> None:
    assert page.by_id("gantt-title").text == "Steps 2 to 3"
    timeline = page.by_id("timeline").text
    assert all(actor in timeline for actor in ("feeder-0", "coordinator", "encoder-0", "backbone"))
    kinds = {node.attributes["class"] for node in page.by_id("timeline").all("rect")}
    assert {"bar k-forward", "bar k-encode", "bar k-optimizer", "bar k-generate", "bar k-fetch"} <= kinds


def test_checkpoints_are_told_with_the_metric_that_made_them_the_best(page: Node) -> None:
    rows = [[cell.text for cell in row.all()] for row in page.by_id("checkpoints").all("tr")][1:]
    assert [row[0] for row in rows] == ["2", "4"] and rows[0][-1] == "eval_loss/seen"


def test_the_status_knows_what_the_run_told(files: RunDir) -> None:
    found = status_of(files.root)
    assert (found.state, found.step, found.num_steps, found.checkpoint_step) == (State.DONE, NUM_STEPS, NUM_STEPS, 4)
    assert set(found.eval_losses) == {"seen", "text"} and found.loss is not None and found.mfu is not None
    assert found.starved_share is not None and found.blocked_share is not None and found.notes == ()
    assert replace(found, eval_losses={}).as_record()["eval_losses"] == {}
