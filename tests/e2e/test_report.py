"""The report and the status of a real run."""

from __future__ import annotations

from pathlib import Path

import pytest

import flowtrain
from flowtrain.observability.callback import Callback
from flowtrain.observability.report.outcome import State
from flowtrain.observability.report.status import RunStatus
from flowtrain.observability.run_dir import RunDir
from flowtrain.types.run_events import StepFinished
from tests.e2e.worlds import World, tiny_config
from tests.report.parsed import parsed

pytestmark = pytest.mark.e2e

NUM_STEPS = 4


class Looking(Callback):
    """Looks at the run while it trains."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.seen: list[RunStatus] = []

    def on_step(self, event: StepFinished) -> None:
        self.seen.append(flowtrain.status(self._directory))


def test_a_run_tells_how_it_stands_and_writes_its_report_at_the_end(tmp_path: Path, ray_cluster: None) -> None:
    world, held_out = World(0), World(1)
    for _ in range(8):
        world.add_mixed(2)
        world.add(1, answer="")  # is quarantined, with a picture that can be shown
    held_out.add_mixed(8)
    evaluation = {
        "path": str(held_out.write(tmp_path / "eval.parquet")),
        "every_steps": 2,
        "max_samples": 4,
        "num_generated": 2,
        "max_new_tokens": 4,
    }
    source = world.write(tmp_path / "train.parquet")
    sections = {"data": {"eval": evaluation, "max_rejected_fraction": 1.0}}
    config = tiny_config(tmp_path, source, "told", **sections)
    files = RunDir(Path(config.runs_dir) / config.name)
    looking = Looking(files.root)
    summary = flowtrain.train(config, callbacks=[looking])
    assert summary.step == NUM_STEPS and summary.num_rejected > 0

    # A callback has a thread of its own, which may be late.
    assert len(looking.seen) == NUM_STEPS and {status.state for status in looking.seen} <= {State.RUNNING, State.DONE}
    assert all(status.num_steps == NUM_STEPS and status.loss is not None for status in looking.seen)
    ended = flowtrain.status(files.root)
    assert (ended.state, ended.step, ended.num_rejected) == (State.DONE, NUM_STEPS, summary.num_rejected)

    report = files.root / "report.html"
    assert report.stat().st_mode & 0o077 == 0
    page = parsed(report.read_text().removeprefix("<!DOCTYPE html>\n"))
    assert page.all("h1")[0].text == "told done" and not page.all("script")
    headings = [node.text for node in page.all("h2")]
    for section in ("Learning", "Generated samples", "Flow of data", "Timeline", "Data", "Quarantine", "Checkpoints"):
        assert section in headings, section
    assert "empty_answer" in page.by_id("quarantine").text
    pictures = page.by_id("quarantine").all("img")
    assert pictures and all((node.attributes["src"] or "").startswith("data:image/jpeg;base64,") for node in pictures)
    assert len(page.by_id("samples").all("article")) == 2
    again = flowtrain.report(files.root, output=tmp_path / "again.html", steps=(2, 3), thumbnails=False)
    page = parsed(again.read_text().removeprefix("<!DOCTYPE html>\n"))
    assert page.by_id("gantt-title").text == "Steps 2 to 3" and not page.all("img")
