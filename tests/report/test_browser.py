"""The report in a real browser: no error, no request, nothing that keeps anybody from reading it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowtrain.observability.report.build import ReportOptions, build_report
from tests.report.chromium import SCHEMES, WIDTHS, check_page, chromium, opened
from tests.report.runs import HOSTILE, event, started, step_record, write_lines, write_run

pytestmark = [pytest.mark.nightly, pytest.mark.processes]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


def finished(root: Path) -> list[Path]:
    return [write_run(root, num_steps=120)]


def failed(root: Path) -> list[Path]:
    """A run that restarted, rejected samples with HTML in their texts, and failed."""
    directory = write_run(root, num_steps=60)
    reason = f"backbone-dp0-pp0-tp0 died: {HOSTILE}"
    restart = event("restart", 30, 30.0, role="encoder", name="encoder-1", reason=HOSTILE, down_s=2.0)
    warning = event("note", 31, 31.0, level="warning", text=HOSTILE)
    end = event("run_ended", 60, 61.0, outcome="failed", reason=reason, duration_s=61.0)
    write_lines(directory / "events.jsonl", [started(), restart, warning, end])
    rejected = {"source": "shapes", "reason": "corrupt_image", "detail": HOSTILE, "id": HOSTILE}
    write_lines(directory / "quarantine.jsonl", [rejected | {"row": row} for row in range(50)])
    return [directory]


def compared(root: Path) -> list[Path]:
    return [write_run(root, "one", num_steps=80), write_run(root, "two", num_steps=100, seed=1, speed=1.5)]


def killed(root: Path) -> list[Path]:
    """A run of an earlier version that was killed."""
    rng = np.random.default_rng(0)
    write_lines(root / "metrics.jsonl", [step_record(step, rng) for step in range(1, 30)])
    (root / "config.yaml").write_text(f"name: {json.dumps(HOSTILE)}\n")
    return [root]


PAGES = {each.__name__: each for each in (finished, failed, compared, killed)}


@pytest.fixture(params=PAGES)
def page_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    picture = (write_run(tmp_path / "other", num_steps=50) / "generated/00000050/shapes-3-0.png").read_bytes()
    runs = tmp_path / "runs"
    runs.mkdir()
    options = ReportOptions(image_of=lambda config, line: picture)
    file = tmp_path / f"{request.param}.html"
    file.write_text(build_report(PAGES[request.param](runs), options), encoding="utf-8")
    return file


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_is_quiet_fits_its_width_and_is_accessible(
    browser: Any, page_file: Path, width: int, scheme: str
) -> None:
    check_page(browser, page_file, width, scheme, page_file.stem)


def test_a_policy_keeps_even_a_script_in_the_page_from_running(browser: Any, tmp_path: Path) -> None:
    """What escapes nothing would still do nothing."""
    (directory,) = finished(tmp_path)
    file = tmp_path / "page.html"
    evil = "<script>document.title='taken'</script><img src='https://example.invalid/x'><p style='color:red'>x</p>"
    file.write_text(build_report([directory], ReportOptions(thumbnails=False)).replace("<footer>", f"{evil}<footer>"))
    context = browser.new_context()
    page, faults = opened(context, file)
    assert page.title() == "quickstart: FlowTrain report"
    assert any("Content Security Policy" in fault for fault in faults)
    assert page.evaluate("document.querySelector('footer').previousElementSibling.tagName") == "P"
    assert page.evaluate("getComputedStyle(document.querySelector('p[style]')).color") != "rgb(255, 0, 0)"
    assert [fault for fault in faults if fault.startswith("refused")] == ["refused: csp"], "of the picture"
    context.close()
