"""``flowtrain report`` and ``flowtrain status`` on the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import flowtrain
from flowtrain.cli.app import app
from flowtrain.errors import ConfigError
from tests.report.runs import HOSTILE, event, started, write_lines, write_run

ROOT = Path(__file__).parents[2]
NO_RUN = "no run 'absent': there is no absent/config.yaml or runs/absent/config.yaml; ./runs has one. Give the run's"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return write_run(tmp_path / "runs", "one", num_steps=30)


def run(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.stdout, done.stderr


def facts_of(output: str) -> dict[str, str]:
    """What ``status`` has printed, by name."""
    return dict(re.split("  +", line.strip(), maxsplit=1) for line in output.splitlines()[1:])


def test_a_report_is_written_into_the_runs_directory(directory: Path) -> None:
    code, output, _ = run("report", "one", "--no-thumbnails")
    file = directory / "report.html"
    assert (code, output) == (0, f"wrote {file}\n")
    assert file.read_text().startswith("<!DOCTYPE html>") and file.stat().st_mode & 0o777 == 0o600


def test_several_runs_are_compared_in_one_page(directory: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "two", num_steps=30, seed=1)
    code, output, _ = run("report", "one", str(tmp_path / "runs" / "two"), "--no-thumbnails")
    assert (code, output) == (0, f"wrote {tmp_path / 'comparison.html'}\n")
    code, _, _ = run("report", "one", "two", "--output", str(tmp_path / "x.html"), "--no-thumbnails")
    assert code == 0 and "Paired difference to one" in (tmp_path / "x.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "absent"], NO_RUN),
        (["status", "absent"], NO_RUN),
        (["report", "one", "--steps", "x"], "--steps x: give a step, or the first and the last one, such as 20-22"),
        (["report", "one", "--steps", "9-3"], "--steps 9-3: give a step, or the first and the last one, such as 20-22"),
        (["report", "one", "--steps", "25"], "steps 25 to 25 (--steps) are not in "),
        (["report", "one", "--output", "x.pdf"], "--output x.pdf: the ending must be .html or .htm"),
        (["report", "one", "--output", "no/x.html"], "--output no/x.html: there is no directory no; create it"),
    ],
)
def test_what_cannot_be_done_is_one_message(directory: Path, arguments: list[str], message: str) -> None:
    code, output, error = run(*arguments)
    assert (code, output) == (2, "") and error.startswith(f"flowtrain: {message}") and error.count("\n") == 1
    assert not (directory / "report.html").exists()


def test_steps_of_the_timeline(directory: Path) -> None:
    for given, shown in (("4", ">Step 4<"), ("4-6", ">Steps 4 to 6<")):
        assert run("report", "one", "--steps", given, "--no-thumbnails")[0] == 0
        assert shown in (directory / "report.html").read_text()


def test_status_of_a_run(directory: Path) -> None:
    code, output, _ = run("status", "one")
    assert code == 0
    assert output.splitlines()[0] == "one  done"
    facts = facts_of(output)
    assert facts["step"] == "30 of 30" and facts["mode"] == "decoupled"
    assert facts["waits"].startswith("backbone starved ") and "encoders blocked" in facts["waits"]
    assert facts["pool"].endswith("of 51.13 MiB") and facts["directory"] == str(directory)
    code, output, _ = run("status", "one", "--json")
    assert code == 0 and json.loads(output)["state"] == "done"


def test_status_shows_the_whole_reason_of_a_failure(directory: Path) -> None:
    reason = f"step 12: training diverged: {'x' * 400}. Ways out: a lower training.learning_rate"
    write_lines(directory / "events.jsonl", [started(), event("run_ended", 30, 30.0, outcome="failed", reason=reason)])
    code, output, _ = run("status", "one")
    words = "".join(line.removeprefix(" " * 2) for line in output.splitlines())
    assert code == 0 and "Ways out: a lower training.learning_rate" in re.sub(" +", " ", words)


def test_status_says_what_a_killed_run_has_lost(directory: Path) -> None:
    write_lines(directory / "events.jsonl", [started(num_steps=100)])
    facts = facts_of(run("status", "one")[1])
    assert facts["checkpoint"] == "none"
    command = f"flowtrain train {directory}/config.yaml --resume"
    assert facts["resume"] == f"there is no checkpoint, so {command} begins anew; steps 1 to 30 are lost"
    saved = event("checkpoint", 29, 29.5, duration_s=1.0, nbytes=1, best_of=None)
    write_lines(directory / "events.jsonl", [started(num_steps=100), saved])
    facts = facts_of(run("status", "one")[1])
    assert facts["checkpoint"] == "after step 29"
    assert facts["resume"] == f"{command} goes on after step 29; step 30 is lost"


def test_no_text_of_a_run_can_steer_the_terminal(directory: Path) -> None:
    text = f"\x1b[2J\x1b]0;x\x07{HOSTILE}[bold]\nnext"
    notes = [event("note", 5, 5.0, level="warning", text=text), event("evaluation", 5, 5.0, name=text, loss=1.0)]
    end = event("run_ended", 30, 30.0, outcome="failed", reason=text, duration_s=1.0)
    write_lines(directory / "events.jsonl", [started(mode=text), *notes, end])
    (directory / "plan.yaml").unlink()
    (directory / "config.yaml").write_text(f"name: {json.dumps(text)}\nmode: {json.dumps(text)}\n")
    code, output, _ = run("status", "one")
    assert code == 0 and "\x1b" not in output and "\x07" not in output and "\u202e" not in output
    assert "[bold]" in output and "<script>" in output


def test_the_functions_of_python_do_the_same(directory: Path) -> None:
    assert flowtrain.report("one", output="mine.html", thumbnails=False) == Path("mine.html").absolute()
    assert flowtrain.status(directory).step == 30
    with pytest.raises(ConfigError, match=r"cannot be written: .*; choose another --output"):
        flowtrain.report(directory, output="no/mine.html", thumbnails=False)


@pytest.mark.parametrize("command", ["report", "status"])
def test_neither_torch_nor_ray_is_imported(directory: Path, command: str) -> None:
    program = f"""
import atexit, sys
atexit.register(lambda: print("HEAVY", [n for n in ("torch", "ray", "transformers", "pyarrow") if n in sys.modules]))
from flowtrain.cli.app import app
app(["{command}", "one"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=600)
    assert done.stdout.endswith("HEAVY []\n"), done.stderr
