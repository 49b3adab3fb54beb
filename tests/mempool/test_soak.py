"""The small version of benchmarks/soak.py, which reports a fault by exit code 1 and a line of text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

REPOSITORY = Path(__file__).parents[2]
NUM_SAMPLES, NUM_KILLS = 2_000, 5


def test_every_position_is_consumed_once_whichever_process_is_killed() -> None:
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "benchmarks/soak.py", "--samples", str(NUM_SAMPLES), "--kills", str(NUM_KILLS), "--json"],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    figures = {figure["name"]: figure for figure in json.loads(done.stdout)["figures"]}
    assert figures["positions consumed once"]["value"] == NUM_SAMPLES
    assert figures["SIGKILLs of producers"]["value"] >= NUM_KILLS
    assert figures["bytes put / bytes of the pool"]["value"] >= 20
    assert figures["parts made again"]["value"] > 0 and figures["reads of an owner that was gone"]["value"] > 0
    assert figures["free + used = bound"]["value"] > NUM_SAMPLES / 10
