"""A whole run through Ray, one epoch long: what all its processes together read of its data, and how soon it is fed.

The data is read under ``counted://``. The model is a few layers, since nothing here depends on it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from _feeding_counted import counting
from _feeding_driver import ROOT, TIME_LIMIT_S, environment, source_overrides
from shared.random_tower import RANDOM_TOWER_OVERRIDES

SMALL_MODEL = (
    *RANDOM_TOWER_OVERRIDES,
    "encoders.vision.config.num_hidden_layers=1",
    "encoders.vision.data_parallel_size=1",
    "encoders.vision.segment_nbytes=67108864",
    "backbone.config.num_hidden_layers=1",
    "scheduler.microbatch_tokens=8192",
    "checkpoint.every_steps=1000000",
    "observability.progress=plain",
    "observability.dashboard=false",
    "observability.ray_metrics=false",
    "observability.trace.steps=1",
)
COMMAND = "from flowtrain.cli.app import main; main()"


@dataclass(frozen=True)
class Ran:
    """What a run read. first_unit_s: from the start of ``flowtrain train`` until its first unit is sized."""

    read_nbytes: int
    num_fetches: int
    num_processes: int
    first_unit_s: float


def run(source: str, num_units: int, overrides: tuple[str, ...] = ()) -> Ran:
    """Train on units of a source, a path or a URL; exits with the run's output if it fails."""
    with counting() as counter, tempfile.TemporaryDirectory() as directory:
        values = [*source_overrides(source, num_units), *SMALL_MODEL, *overrides]
        values += [f"runs_dir={directory}", "name=feeding"]
        command = [sys.executable, "-c", COMMAND, "train", str(ROOT / "configs" / "quickstart.yaml"), *values]
        started_s = time.time()
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, env=environment(), timeout=TIME_LIMIT_S, **output)
        if done.returncode:
            sys.exit(f"the run failed with exit code {done.returncode}:\n{done.stdout[-4000:]}")
        sized_s = _first_sized_s(Path(directory) / "feeding" / "trace.json")
        return Ran(*counter.read(), counter.num_processes, sized_s - started_s)


def _first_sized_s(trace: Path) -> float:
    """When the first unit was sized, since the Unix epoch."""
    events = json.loads(trace.read_text())["traceEvents"]
    return min(event["ts"] + event["dur"] for event in events if event.get("name") == "size") / 1e6
