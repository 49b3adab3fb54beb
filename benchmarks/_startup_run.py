"""One emulated run of many actors by the real controller: ``python benchmarks/_startup_run.py JSON DIRECTORY``.

``measure`` starts this file as the command that a user would start, and reads what it and its actors wrote down.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
WARM_UP_STEPS = 5
LIMIT_S = 400.0
END_STEPS = 2
"""Last steps, which do not count: producers have stopped."""


@dataclass(frozen=True)
class Shape:
    """An emulated run: degrees of the backbone, encoders, feeders, nodes, processes that hold the actors, steps."""

    dp: int
    tp: int
    num_encoders: int = 32
    num_feeders: int = 4
    num_nodes: int = 32
    num_processes: int = 4
    batch_size: int = 1024
    num_steps: int = 27
    slots: int = 4
    """Microbatches of a rank in a step."""

    @property
    def num_ranks(self) -> int:
        """Ranks of the backbone."""
        return self.dp * self.tp

    @property
    def num_actors(self) -> int:
        """Actors of the run, except the coordinator."""
        return self.num_ranks + self.num_encoders + self.num_feeders

    @property
    def overrides(self) -> list[str]:
        """Overrides of configs/quickstart.yaml, whose model only has to be divisible."""
        samples = self.batch_size // (self.dp * self.slots)
        return [
            "name=startup",
            "backbone.config.num_attention_heads=8",
            "backbone.config.num_key_value_heads=8",
            "backbone.config.head_dim=24",
            f"backbone.data_parallel_size={self.dp}",
            f"backbone.tensor_parallel_size={self.tp}",
            "backbone.num_cpus=0.004",
            f"encoders.vision.data_parallel_size={self.num_encoders}",
            "encoders.vision.num_cpus=0.01",
            f"encoders.vision.max_batch_patches={self.batch_size // self.num_encoders * 1024}",
            "encoders.vision.segment_nbytes=67108864",
            f"data.num_feeders={self.num_feeders}",
            "data.eval=null",
            "data.shuffle=false",
            f"training.global_batch_size={self.batch_size}",
            f"training.max_steps={self.num_steps}",
            f"scheduler.microbatch_tokens={384 * samples if samples > 1 else 512}",
            "checkpoint.every_steps=1000000",
            "pool.max_processes=65536",
            "observability.progress=plain",
            "observability.dashboard=false",
            "observability.trace.steps=0",
        ]


@dataclass(frozen=True)
class Measured:
    """What an emulated run took. Times are seconds since the command was started.

    phases: start of the command, and of each phase that the controller shows.
    first_s, last_s: when the first and the last replica had its first microbatch.
    step_s: seconds of a step in the steady state. cpu_s, controller_cpu_s: processor seconds of the coordinator's
    and the controller's process in such a step.
    calls: questions to the coordinator in all, by name.
    num_steps: steps in all.
    """

    phases: dict[str, float]
    first_s: float
    last_s: float
    step_s: float
    cpu_s: float
    controller_cpu_s: float
    calls: dict[str, int]
    num_steps: int


def measure(shape: Shape) -> Measured:
    """Run the command and wait for its end. Raises RuntimeError, with its output, if it fails."""
    with tempfile.TemporaryDirectory(prefix="ft-startup-") as directory:
        records = Path(directory)
        environment = os.environ | {
            "FLOWTRAIN_STARTUP_RECORDS": directory,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}",
            "PYTHONUNBUFFERED": "1",
        }
        environment.pop("RAY_ADDRESS", None)
        command = [sys.executable, __file__, json.dumps(asdict(shape)), directory]
        started = time.time()
        process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        lines = [(time.time() - started, line.rstrip()) for line in process.stdout]
        if process.wait():
            raise RuntimeError("\n".join(line for _, line in lines[-60:]))
        return _measured(records, started, lines)


def _measured(records: Path, started: float, lines: list[tuple[float, str]]) -> Measured:
    first = [record["at_s"] - started for record in _read(records, "first-microbatch")]
    shown = {line.removesuffix(" ..."): at_s for at_s, line in lines if re.fullmatch(r"[a-z].* \.\.\.", line)}
    coordinator = {record["step"]: record for record in _read(records, "coordinator")}
    num_steps = max(coordinator)
    since, until = coordinator[WARM_UP_STEPS], coordinator[num_steps - END_STEPS]
    count = until["step"] - since["step"]
    times, cpu_s = zip(*((each["at_s"], each["cpu_s"]) for each in _read(records, "controller")), strict=True)
    begun_s, ended_s = np.interp([since["at_s"], until["at_s"]], times, cpu_s)
    last_calls = {record["pid"]: record["calls"] for record in _read(records, "calls")}
    calls = Counter(chain.from_iterable(Counter(each).elements() for each in last_calls.values()))
    return Measured(
        phases={"imports": 0.0} | shown,
        first_s=min(first),
        last_s=max(first),
        step_s=(until["at_s"] - since["at_s"]) / count,
        cpu_s=(until["cpu_s"] - since["cpu_s"]) / count,
        controller_cpu_s=float(ended_s - begun_s) / count,
        calls=dict(calls),
        num_steps=num_steps,
    )


def _read(records: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for file in sorted(records.glob(f"{name}-*.jsonl")) for line in file.open()]


def run(shape: Shape, directory: Path) -> None:
    """The command: as ``flowtrain train``, with emulated actors."""
    from _startup_host import (
        EmulatedEncoder,
        EmulatedFeeder,
        EmulatedRank,
        MeasuredCoordinator,
        note,
    )
    from _startup_nodes import Cluster, EmulatedNodes

    from flowtrain.config.load import load_config
    from flowtrain.controller.run import run_training
    from flowtrain.controller.worker_group import ActorClasses
    from flowtrain.observability.run_dir import check_run_dir

    def measure_cpu() -> None:
        while True:
            note("controller", {"at_s": time.time(), "cpu_s": time.process_time()})
            time.sleep(1.0)

    config = load_config(ROOT / "configs" / "quickstart.yaml", [*shape.overrides, f"runs_dir={directory / 'runs'}"])
    check_run_dir(config, False)
    classes = ActorClasses(
        coordinator=MeasuredCoordinator,
        feeder=EmulatedFeeder,
        encoder=EmulatedEncoder,
        backbone=EmulatedRank,
        launcher=EmulatedNodes(Cluster(shape.num_nodes, shape.num_processes, shape.num_ranks, shape.num_actors)),
    )
    threading.Thread(target=measure_cpu, daemon=True).start()
    run_training(config, classes=classes)


if __name__ == "__main__":
    run(Shape(**json.loads(sys.argv[1])), Path(sys.argv[2]))
