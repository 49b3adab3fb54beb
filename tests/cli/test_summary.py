"""The lines at the end of a run."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from flowtrain.cli.tables import summary_table
from flowtrain.controller.summary import RunSummary


def shown(**changes: object) -> str:
    values: dict[str, object] = {"loss": 1.0, "eval_loss": None, "num_rejected": 0, "checkpoint": None}
    values |= {"directory": Path("runs/one"), "step": 2, "num_steps": 2, "stopped": False, "duration_s": 1.0}
    console = Console(width=200)
    with console.capture() as capture:
        console.print(summary_table(RunSummary(**(values | changes))))  # type: ignore[arg-type]
    return " ".join(capture.get().split())


def test_a_planned_rate_is_next_to_the_measured_one() -> None:
    line = "rate planned 5,495 tokens/s, measured 5,544"
    assert line in shown(tokens_per_s=5544.2, planned_tokens_per_s=5495.4)
    assert "planned" not in shown(tokens_per_s=5544.2), "no plan was made"
    assert "planned" not in shown(planned_tokens_per_s=5495.4), "too few steps to measure"


def test_the_time_is_that_of_this_start() -> None:
    assert "done step 2 of 2 in 1 s" in shown() and "since the start" not in shown()
    assert "done step 20 of 20 in 1 s since the start after step 15" in shown(step=20, num_steps=20, start_step=15)


def test_rates_that_are_the_hosts_are_said() -> None:
    assert "warning the host's own work" in shown(host_warning="the host's own work is 57% of a step")
    assert "warning" not in shown()


def test_trackers_that_were_off_are_said() -> None:
    text = "boards:Board was off from step 3 on: ValueError: [board] is down (boards.py:7, in on_step)"
    assert f"tracker {text}" in shown(trackers_off=(text,))
    assert "tracker" not in shown()


def test_the_report_is_named_if_it_was_written(tmp_path: Path) -> None:
    assert "report.html" not in shown(directory=tmp_path)
    (tmp_path / "report.html").touch()
    assert f"report {tmp_path / 'report.html'}" in shown(directory=tmp_path)
