"""A damaged configuration is refused with one message and exit code 2, or is still a valid one."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from pathlib import Path

import pytest
import typer

from flowtrain import api
from flowtrain.cli.exit_codes import EXIT_REFUSED, errors_to_exit_codes
from tests.fuzz.config_mutations import Case, cases
from tests.fuzz.data_mutations import write_parquet
from tests.fuzz.guard import Hung, at_most

LIMIT_S = 20
"""No configuration may take so long; a check of one takes a fraction of a second."""
MAX_MESSAGE = 20_000


def outcome(case: Case, capsys: pytest.CaptureFixture[str]) -> str:
    """``valid`` or ``refused``; anything else is what the test is for."""
    Path("run.yaml").write_bytes(case.text)
    capsys.readouterr()
    try:
        with at_most(LIMIT_S), errors_to_exit_codes():
            api.dry_run("run.yaml", case.overrides)
    except typer.Exit as ended:
        message = capsys.readouterr().err
        said = message[message.index("flowtrain: ") :]
        assert "Traceback" not in said and len(said) < MAX_MESSAGE, said[:2000]
        said.encode("utf-8")
        assert ended.exit_code == EXIT_REFUSED, said
        return "refused"
    return "valid"


def fuzz(seed: int, count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Counter[str]:
    write_parquet(tmp_path / "data.parquet", num_rows=6)
    tokenizer = str(Path("assets/tokenizer").resolve())
    found: Counter[str] = Counter()
    faults: list[str] = []
    with contextlib.chdir(tmp_path):
        for number, case in enumerate(cases(seed, count, "data.parquet", tokenizer)):
            started = time.monotonic()
            try:
                found[outcome(case, capsys)] += 1
            except (Exception, Hung) as error:
                about = f"{type(error).__name__}: {str(error)[:300]} after {time.monotonic() - started:.1f} s"
                faults.append(f"case {number} of seed {seed} {case.changes} {case.overrides}: {about}"[:1500])
    assert not faults, f"{len(faults)} of {count}:\n" + "\n".join(faults)
    return found


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_a_damaged_configuration_is_refused_or_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = fuzz(seed=1, count=100, tmp_path=tmp_path, capsys=capsys)
    assert found["refused"] >= 50 and found["valid"] >= 3, found


@pytest.mark.nightly
def test_a_thousand_damaged_configurations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = fuzz(seed=2, count=1000, tmp_path=tmp_path, capsys=capsys)
    assert found["refused"] >= 500 and found["valid"] >= 30, found
