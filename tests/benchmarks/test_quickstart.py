"""The quickstart, trained as a user trains it, looks at the pictures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.e2e
@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_wrong_picture_costs_more_than_the_right_one() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/quickstart.py", "--json"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = {each["name"]: each for each in json.loads(done.stdout)["figures"]}
    for name in ("loss_ratio", "wrong_minus_right_seed0", "wrong_minus_right_in_errors_seed0"):
        assert figures[name]["met"], figures[name]
