"""What a command that fails prints, and its exit code."""

from __future__ import annotations

import errno

import pytest
import typer

from flowtrain.cli.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REFUSED, errors_to_exit_codes
from flowtrain.errors import ConfigError, FlowTrainError, NonFiniteError, RunFileError


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("seed = -1"), EXIT_REFUSED),
        (NonFiniteError("step 3: training diverged"), EXIT_FAILED),
        (RunFileError("metrics.jsonl cannot be written"), EXIT_FAILED),
    ],
)
def test_an_error_of_ours_is_one_message(error: FlowTrainError, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as caught, errors_to_exit_codes():
        raise error
    assert caught.value.exit_code == code and capsys.readouterr().err == f"flowtrain: {error}\n"


@pytest.mark.parametrize(
    ("error", "text", "code"),
    [(NonFiniteError("diverged"), "diverged", EXIT_FAILED), (KeyboardInterrupt(), "interrupted", EXIT_INTERRUPTED)],
)
def test_notes_of_an_error_follow_its_message(
    error: BaseException, text: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    error.add_note("the report of the run: runs/x/report.html")
    with pytest.raises(typer.Exit) as caught, errors_to_exit_codes():
        raise error
    assert caught.value.exit_code == code
    assert capsys.readouterr().err == f"flowtrain: {text}\nflowtrain: the report of the run: runs/x/report.html\n"


def test_a_disk_that_takes_no_data_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as caught, errors_to_exit_codes():
        raise OSError(errno.ENOSPC, "No space left on device", "runs/x/plan.yaml")
    assert caught.value.exit_code == EXIT_FAILED
    message = capsys.readouterr().err
    assert "No space left on device: 'runs/x/plan.yaml'" in message and message.count("\n") == 1


def test_other_errors_keep_their_traceback() -> None:
    with pytest.raises(FileNotFoundError), errors_to_exit_codes():
        raise FileNotFoundError(errno.ENOENT, "No such file", "x")
