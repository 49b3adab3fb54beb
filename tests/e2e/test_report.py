"""The report and the status of real runs: one that is done, one that failed, and both side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import flowtrain
from flowtrain.config.run import RunConfig
from flowtrain.errors import DataError
from flowtrain.observability.callback import Callback
from flowtrain.observability.report.outcome import State
from flowtrain.observability.report.status import RunStatus
from flowtrain.observability.run_dir import RunDir, run_dir
from flowtrain.types.run_events import StepFinished
from tests.e2e.worlds import World, tiny_config
from tests.report.chromium import SCHEMES, WIDTHS, check_page, chromium
from tests.report.parsed import Node, parsed

pytestmark = pytest.mark.e2e

NUM_STEPS = 4
CAPTION = "<script>document.title = 'taken'</script> & a <b>red</b> apple"


class Looking(Callback):
    """Looks at the run while it trains."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.seen: list[RunStatus] = []

    def on_step(self, event: StepFinished) -> None:
        self.seen.append(flowtrain.status(self._directory))


@dataclass(frozen=True)
class Runs:
    """Two runs, of which the second one failed for this reason."""

    done: RunDir
    failed: RunDir
    reason: str
    seen: list[RunStatus]
    num_rejected: int


def config_of(directory: Path, name: str, **data: Any) -> RunConfig:
    """A third of the training samples is quarantined, each with a picture that can be shown."""
    world, held_out = World(0), World(1)
    for _ in range(8):
        world.add_mixed(2)
        world.add(1, answer="")
    held_out.add(1, answer=CAPTION)
    held_out.add_mixed(8)
    evaluation = {
        "path": str(held_out.write(directory / "eval.parquet")),
        "every_steps": 2,
        "max_samples": 4,
        "num_generated": 2,
        "max_new_tokens": 4,
    }
    return tiny_config(directory, world.write(directory / "train.parquet"), name, data={"eval": evaluation, **data})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Runs:
    directory = tmp_path_factory.mktemp("reported")
    done = config_of(directory, "told", max_rejected_fraction=1.0)
    looking = Looking(run_dir(done).root)
    summary = flowtrain.train(done, callbacks=[looking])
    assert summary.step == NUM_STEPS
    failed = config_of(directory, "refused", max_rejected_fraction=0.2)
    with pytest.raises(DataError, match=r"data\.max_rejected_fraction") as caught:
        flowtrain.train(failed, ["training.max_steps=40"])
    return Runs(run_dir(done), run_dir(failed), str(caught.value), looking.seen, summary.num_rejected)


def page_of(file: Path) -> Node:
    return parsed(file.read_text().removeprefix("<!DOCTYPE html>\n"))


def test_a_run_tells_how_it_stands_while_it_trains(runs: Runs) -> None:
    # A callback has a thread of its own, which may be late.
    assert len(runs.seen) == NUM_STEPS and {status.state for status in runs.seen} <= {State.RUNNING, State.DONE}
    assert all(status.num_steps == NUM_STEPS and status.loss is not None for status in runs.seen)
    ended = flowtrain.status(runs.done.root)
    assert (ended.state, ended.step, ended.num_rejected) == (State.DONE, NUM_STEPS, runs.num_rejected)
    failed = flowtrain.status(runs.failed.root)
    assert (failed.state, failed.reason) == (State.FAILED, runs.reason)


def test_a_run_writes_its_report_at_the_end(runs: Runs, tmp_path: Path) -> None:
    report = runs.done.root / "report.html"
    assert report.stat().st_mode & 0o077 == 0
    page = page_of(report)
    assert page.all("h1")[0].text == "told done" and not page.all("script")
    headings = [node.text for node in page.all("h2")]
    for section in ("Learning", "Generated samples", "Flow of data", "Timeline", "Data", "Quarantine", "Checkpoints"):
        assert section in headings, section
    assert "empty_answer" in page.by_id("quarantine").text
    pictures = page.by_id("quarantine").all("img")
    assert pictures and all((node.attributes["src"] or "").startswith("data:image/jpeg;base64,") for node in pictures)
    first, _ = page.by_id("samples").all("article")
    assert CAPTION in first.text and len(first.all("img")) == 1
    again = flowtrain.report(runs.done.root, output=tmp_path / "again.html", steps=(2, 3), thumbnails=False)
    page = page_of(again)
    assert page.by_id("gantt-title").text == "Steps 2 to 3" and not page.all("img")


def test_a_run_that_failed_says_why_first(runs: Runs) -> None:
    page = page_of(runs.failed.root / "report.html")
    assert page.all("h1")[0].text == "refused failed"
    assert page.all("p", "first")[0].text == f"The run failed: {runs.reason}"
    assert runs.reason in page.by_id("faults").text


def test_runs_are_compared_step_by_step(runs: Runs, tmp_path: Path) -> None:
    page = page_of(flowtrain.report(runs.done.root, runs.failed.root, output=tmp_path / "both.html"))
    assert page.all("h1")[0].text == "told and refused"
    rows = [[cell.text for cell in row.all()] for row in page.by_id("differences").all("tr")]
    # Both are trained on the same rows in the same order, so that they differ in nothing but time.
    loss, *_ = (row for row in rows if row[:2] == ["refused", "training loss"])
    count = int(loss[2])
    assert 1 <= count <= NUM_STEPS and loss[3] == "+0.0000" and loss[5] == f"{count} of {count}"
    assert "data.max_rejected_fraction" in page.by_id("configurations").text


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_pages_of_real_runs_are_quiet_in_a_browser(
    runs: Runs, browser: Any, tmp_path: Path, width: int, scheme: str
) -> None:
    both = flowtrain.report(runs.done.root, runs.failed.root, output=tmp_path / "both.html")
    pages = {"real": runs.done.root / "report.html", "real-failed": runs.failed.root / "report.html", "real-both": both}
    for name, file in pages.items():
        check_page(browser, file, width, scheme, name)
