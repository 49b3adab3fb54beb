"""Directories as runs leave them, made of numbers alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

START_S = 1_795_000_000.0
HOSTILE = "<script>alert('x')</script><img src=x onerror=alert(1)>&\"'</title></style>\u202e"
"""What a caption may hold."""
CONFIG = """name: {name}
mode: decoupled
seed: {seed}
data:
  sources:
  - name: shapes
    path: assets/shapes/train.parquet
    weight: 0.6
  - name: openclipart
    path: assets/openclipart/train.parquet
    weight: 0.4
training:
  max_steps: {num_steps}
"""
PLAN = """encoders:
  vision:
    data_parallel_size: 2
    tensor_parallel_size: 1
    pipeline_parallel_size: 1
    num_cpus: 0.5
    num_devices: 0.0
    segment_nbytes: 16777216
backbone:
  data_parallel_size: 1
  tensor_parallel_size: 1
  pipeline_parallel_size: 1
  num_cpus: 1.0
  num_devices: 0.0
  segment_nbytes: 0
feeder:
  data_parallel_size: 1
  tensor_parallel_size: 1
  pipeline_parallel_size: 1
  num_cpus: 0.0
  num_devices: 0.0
  segment_nbytes: 20055438
mode: decoupled
schema: 1
"""


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write a JSON object a line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def step_record(step: int, rng: np.random.Generator, starved: float = 0.03, speed: float = 1.0) -> dict[str, Any]:
    """A line of ``metrics.jsonl``, as schema 1 has it."""
    step_time_s = (2.2 if step == 1 else 0.9 + 0.1 * rng.random()) / speed
    tokens = 1500 + int(200 * rng.random())
    loss = 2.5 + 5.8 * math.exp(-step / 60) + 0.2 * rng.standard_normal()
    return {
        "schema": 1,
        "timestamp": START_S + 1.0 * step / speed,
        "step": step,
        "epoch": step / 66,
        "loss": loss,
        "lr": 1.5e-3 * min(1, step / 20) * (0.5 + 0.5 * math.cos(math.pi * step / 240)),
        "grad_norm": 5 * math.exp(-step / 80) + 0.4 + 0.2 * rng.random(),
        "num_samples": 16,
        "num_tokens": tokens,
        "num_target_tokens": 140,
        "step_time_s": step_time_s,
        "tokens_per_s": tokens / step_time_s,
        "tokens_per_s_per_device": tokens / step_time_s / 3,
        "mfu": 0.31 + 0.05 * rng.random(),
        "backbone_mfu": 0.42 + 0.05 * rng.random(),
        "peak_flops": 8.5e10,
        "starved_s": step_time_s * starved * 2 * rng.random(),
        "blocked_s": 2 * step_time_s * 0.8 * rng.random(),
        "fetch_s": 0.05 * rng.random(),
        "read_nbytes": 200_000,
        "plan_digest": f"{step:016x}",
        "plan_time_s": 0.0007,
        "produced_samples_per_s": 16 / step_time_s * (0.5 + rng.random()),
        "consumed_samples_per_s": 16 / step_time_s,
        "num_microbatches": 4,
        "packing_fill": 0.7 + 0.1 * rng.random(),
        "dp_imbalance": 0.0,
        "pool_dram_nbytes": int(8e6 + 3e6 * rng.random()),
        "pool_hbm_nbytes": 0,
        "eval_loss": None,
        "rejected": 0,
        "skipped": False,
        "skipped_steps": 0,
        "rewound_to": None,
    }


def newer_keys(step: int, rng: np.random.Generator) -> dict[str, Any]:
    """Keys that schema 2 adds."""
    return {
        "source_losses": {"shapes": 2.0 + 5 * math.exp(-step / 50), "openclipart": 3.4 + 5 * math.exp(-step / 90)},
        "slot_imbalance": [0.05 * rng.random(), 0.2 * rng.random()],
        "lookahead_steps": int(rng.integers(0, 3)),
        "read_nbytes_by_transport": {"shared_memory": 200_000, "local": 20_000},
        "retries": 0,
        "restarts": 0,
        "pool": [
            {"role": "encoder", "rank": 0, "tier": "dram", "used_nbytes": 8_000_000, "bound_nbytes": 33_554_432},
            {"role": "feeder", "rank": 0, "tier": "dram", "used_nbytes": 3_000_000, "bound_nbytes": 20_055_438},
        ],
    }


def event(kind: str, step: int, after_s: float, **values: Any) -> dict[str, Any]:
    """A line of ``events.jsonl``."""
    return {"schema": 1, "timestamp": START_S + after_s, "event": kind, "step": step, **values}


def started(step: int = 0, after_s: float = 0.0, resumed_from: int | None = None, **values: Any) -> dict[str, Any]:
    """The line of a start."""
    told = {"run": "quickstart", "mode": "decoupled", "num_steps": 240, "resumed_from": resumed_from, "device": "cpu"}
    return event("run_started", step, after_s, **{**told, "roles": {"encoder": 2}, "versions": {}, **values})


def trace_events(steps: Iterable[int]) -> list[dict[str, Any]]:
    """Events of a trace: a feeder, two encoders with decode threads, a backbone rank that fetches."""
    found: list[dict[str, Any]] = []
    actors = ("feeder-0", "coordinator", "encoder-0", "encoder-1", "backbone-dp0-pp0-tp0")
    for pid, actor in enumerate(actors, start=1):
        found.append({"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": actor}})
        found.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": 1, "args": {"name": actor}})
        side = {3: "decode", 4: "decode", 5: "fetch"}.get(pid)
        if side:
            found.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": 2, "args": {"name": f"{actor} {side}"}})

    def span(name: str, pid: int, tid: int, start_s: float, length_s: float, **args: Any) -> None:
        times = {"ts": round(start_s * 1e6, 1), "dur": round(length_s * 1e6, 1)}
        found.append({"name": name, "cat": "flowtrain", "ph": "X", **times, "pid": pid, "tid": tid, "args": args})

    for step in steps:
        at = START_S + step - 1.0
        span("size", 1, 1, at + 0.02, 0.12, step=step + 2, samples=16)
        span("pack", 2, 1, at + 0.15, 0.004, step=step + 2)
        for encoder in (0, 1):
            for batch in range(3):
                start = at + 0.3 * batch + 0.04 * encoder
                span("decode", 3 + encoder, 2, start, 0.07, samples=4)
                span("encode", 3 + encoder, 1, start + 0.08, 0.14, images=8, unit=step)
                span("put", 3 + encoder, 1, start + 0.22, 0.01, samples=4)
        for microbatch in range(4):
            start = at + 0.03 + 0.22 * microbatch
            span("fetch", 5, 2, start - 0.02, 0.015, unit=step, microbatch=microbatch)
            span("forward", 5, 1, start, 0.07, microbatch=microbatch, num_tokens=400)
            span("backward", 5, 1, start + 0.07, 0.12, microbatch=microbatch)
        span("optimizer", 5, 1, at + 0.92, 0.06)
    return found


def write_trace(path: Path, steps: Iterable[int]) -> None:
    """Write a trace as the run does: an event a line."""
    body = ",\n".join(json.dumps(each) for each in trace_events(steps))
    path.write_text(f'{{"displayTimeUnit": "ms", "traceEvents": [\n{body}\n]}}\n')


def picture(path: Path, color: str = "teal") -> None:
    """Write a picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("RGB", (224, 160), color)
    image.paste("gold", (60, 40, 150, 120))
    image.save(path)


def evaluation(root: Path, step: int, loss: float, text: str) -> dict[str, Any]:
    """The line of an evaluation with two generated samples, whose pictures it writes."""
    generated = []
    for row in (3, 7):
        name = f"generated/{step:08d}/shapes-{row}-0.png"
        picture(root / name, "teal" if row == 3 else "firebrick")
        prompt = "What is in the picture?"
        sample = {"source": "shapes", "row": row, "prompt": prompt, "reference": "a gold square", "text": text}
        generated.append({**sample, "images": [name]})
    counts = {"num_samples": 32, "num_target_tokens": 300, "duration_s": 1.2}
    return event("evaluation", step, step + 0.5, name="shapes", loss=loss, **counts, generated=generated)


def write_run(
    root: Path, name: str = "quickstart", num_steps: int = 240, seed: int = 0, starved: float = 0.03, speed: float = 1.0
) -> Path:
    """Write a run that ended well, with everything that a run of today tells."""
    directory = root / name
    directory.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    records = [
        step_record(step, rng, starved, speed) | newer_keys(step, rng) | {"schema": 2}
        for step in range(1, num_steps + 1)
    ]
    write_lines(directory / "metrics.jsonl", records)
    (directory / "config.yaml").write_text(CONFIG.format(name=name, seed=seed, num_steps=num_steps))
    (directory / "plan.yaml").write_text(PLAN)
    (directory / "quarantine.jsonl").touch()
    write_trace(directory / "trace.json", range(1, min(num_steps, 20) + 1))
    events = [started(num_steps=num_steps)]
    for step in range(50, num_steps + 1, 50):
        answer = "a gold square" if step > 150 else "a red circle"
        events.append(evaluation(directory, step, 2.5 + 3 * math.exp(-step / 60), answer))
        events.append(event("checkpoint", step, step + 0.9, duration_s=0.4, nbytes=30_000_000, best_of=None))
    end_s = num_steps / speed + 1.0
    events.append(event("run_ended", num_steps, end_s, outcome="done", reason=None, duration_s=end_s + 6))
    write_lines(directory / "events.jsonl", events)
    return directory
