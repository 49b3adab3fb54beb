"""The driver's part of a run with feeders: it indexes the data, and starts the processes."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from _feeding_feeder import UNIT_POSITIONS, Fed, Given, Job

from flowtrain.config.load import load_config
from flowtrain.controller.prepare import first_flow_settings, prepare

ROOT = Path(__file__).resolve().parents[1]
FEEDER = Path(__file__).with_name("_feeding_feeder.py")
IMAGE_LIMIT_NBYTES = 1 << 20
"""A little more than the largest image."""
TIME_LIMIT_S = 1800


def source_overrides(source: str, num_units: int) -> tuple[str, ...]:
    """Configuration of a run on a source, a path or a URL, with the quickstart's model and tokenizer."""
    return (
        f"data.sources=[{{path: '{source}', name: feeding}}]",
        "data.eval=null",
        f"data.max_image_nbytes={IMAGE_LIMIT_NBYTES}",
        f"training.global_batch_size={UNIT_POSITIONS}",
        f"training.max_steps={num_units}",
    )


def prepared(job: Job) -> Given:
    """Do what the driver does before it starts feeders."""
    started_s = time.perf_counter()
    values = [*source_overrides(job.source, job.num_units), f"data.num_feeders={job.num_feeders}", *job.overrides]
    config = load_config(ROOT / "configs" / "quickstart.yaml", values)
    run_spec = prepare(config, check_pool=False)
    state, segment_nbytes = first_flow_settings(run_spec).sampler_state, run_spec.plan.feeder.segment_nbytes
    return Given(config, run_spec.indexes, state, segment_nbytes, time.perf_counter() - started_s)


def feed(jobs: Sequence[Job]) -> list[Fed]:
    """Run the feeders of one run at the same time, a process each."""
    given, processes = prepared(jobs[0]), []
    for job in jobs:
        command = ["taskset", "-c", str(job.core), sys.executable, str(FEEDER)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment())
        assert process.stdin is not None
        process.stdin.write(pickle.dumps((replace(job, spawned_s=time.time()), given)))
        process.stdin.close()
        process.stdin = None
        processes.append(process)
    outputs = [process.communicate(timeout=TIME_LIMIT_S)[0] for process in processes]
    for process in processes:
        if process.returncode:
            sys.exit(f"a feeder failed with exit code {process.returncode}")
    return [Fed(**json.loads(output.splitlines()[-1])) for output in outputs]


def environment() -> dict[str, str]:
    """The environment of a process that imports this repository's package."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path), "TOKENIZERS_PARALLELISM": "false"}
