"""Measured against planned rates: on two cores, one device each, and on one core that encoder and backbone share.

python benchmarks/plan_real.py [--repeats N] [--steps N] [--json]

Measures a profile of a small vision-language model on this machine, lets the allocator predict the samples/s of both
placements, and trains both in turn, every process pinned to its core. A run's rate is that of its middle steps: steps
that fill the pipeline, and steps after the last image is encoded, do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

import ray
from _plan_real import ON_ONE_CORE, ON_TWO_CORES, write_data
from _report import Figure, at_least, at_most, emit
from shared.random_tower import RANDOM_TOWER_OVERRIDES

import flowtrain
from flowtrain.config.load import load_config
from flowtrain.config.run import RunConfig
from flowtrain.controller.run import run_training
from flowtrain.controller.worker_group import ActorClasses
from flowtrain.observability.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
LOOKAHEAD = 1
EDGE_STEPS = LOOKAHEAD + 2
"""Steps that do not count: at a run's start the encoder works ahead, at its end it is idle."""
REPEATS, STEPS = 7, 12
BATCH = 8
WITHIN = 0.10
MODEL = (
    *RANDOM_TOWER_OVERRIDES,
    "encoders.vision.config.image_size=224",
    "encoders.vision.config.hidden_size=384",
    "encoders.vision.config.intermediate_size=1536",
    "encoders.vision.config.num_attention_heads=6",
    "encoders.vision.config.num_hidden_layers=12",
    "encoders.vision.max_batch_patches=784",
    "encoders.vision.segment_nbytes=67108864",
    "encoders.vision.data_parallel_size=1",
    "backbone.config.hidden_size=320",
    "backbone.config.intermediate_size=1024",
    "backbone.config.num_hidden_layers=4",
    "backbone.config.num_attention_heads=5",
    "backbone.config.num_key_value_heads=5",
    "backbone.config.head_dim=64",
    "backbone.num_cpus=0.5",
    "data.eval=null",
    f"training.global_batch_size={BATCH}",
    "scheduler.microbatch_tokens=1024",
    f"scheduler.lookahead_steps={LOOKAHEAD}",
    "checkpoint.every_steps=100000",
    "observability.progress=off",
    "observability.dashboard=false",
    "observability.trace.steps=0",
)
"""A tower of 21 M parameters and a backbone of 7 M, images of 196 tokens: both take about the same time per sample."""


@dataclass(frozen=True)
class Placement:
    """A way to place encoder and backbone. num_devices: the number given to the allocator."""

    name: str
    num_devices: int
    classes: ActorClasses


PLACEMENTS = (Placement("a core each", 2, ON_TWO_CORES), Placement("one core shared", 1, ON_ONE_CORE))


def config_of(name: str, steps: int, directory: str) -> RunConfig:
    """A run in which computing takes nearly all the time."""
    data = Path(directory) / "train.parquet"
    changes = (
        f"name={name}",
        f"runs_dir={directory}",
        f"training.max_steps={steps}",
        f"data.sources=[{{path: {data}}}]",
    )
    return load_config(ROOT / "configs" / "quickstart.yaml", [*MODEL, *changes])


def predict(steps: int, directory: str) -> tuple[dict[str, float], dict[str, float]]:
    """Profile and plan; returns the samples/s of each placement, and of each module alone."""
    config = config_of("profiled", steps, directory)
    report = flowtrain.profile(config, devices=2, progress=lambda what: print(f"measuring {what}", file=sys.stderr))
    path = Path(directory) / "profile.json"
    path.write_text(report.profile.to_json(), encoding="utf-8")
    plans = {
        each.name: flowtrain.plan(config, devices=each.num_devices, profile=path).allocation for each in PLACEMENTS
    }
    alone = {module.name: module.production for module in plans[PLACEMENTS[0].name].modules}
    return {name: plan.rate for name, plan in plans.items()}, alone


def measured_rate(placement: Placement, number: int, steps: int, directory: str) -> float:
    """Train and return samples/s of the steps in the middle."""
    config = config_of(f"{placement.num_devices}-{number}", steps, directory)
    summary = run_training(config, classes=placement.classes)
    middle = list(read_metrics(summary.directory / "metrics.jsonl"))[EDGE_STEPS:-EDGE_STEPS]
    return float(sum(step["num_samples"] for step in middle) / sum(step["step_time_s"] for step in middle))


def figures_of(
    predicted: dict[str, float], alone: dict[str, float], measured: dict[str, list[float]], load: float
) -> list[Figure]:
    """Predictions, medians and quartiles, and whether predicted and measured rates have the same order."""
    figures = [
        Figure("load of the machine", load, "processes", note="before; the figures are of two cores to themselves")
    ]
    figures += [Figure(f"{name} alone, predicted", rate, "samples/s") for name, rate in alone.items()]
    for name, rates in measured.items():
        low, middle, high = quantiles(rates, n=4) if len(rates) > 1 else rates * 3
        spread = f"quartiles {low:.4g} and {high:.4g} of {len(rates)} runs"
        figures += [
            Figure(f"{name}, predicted", predicted[name], "samples/s"),
            Figure(f"{name}, measured", middle, "samples/s", note=spread),
            at_most(
                f"{name}, off by", abs(predicted[name] / middle - 1.0), "of it", WITHIN, "predicted / measured - 1"
            ),
        ]
    apart, shared = (placement.name for placement in PLACEMENTS)
    by_median = median(measured[apart]) > median(measured[shared])
    same_order = by_median == (predicted[apart] > predicted[shared])
    pairs = sum(a > b for a, b in zip(measured[apart], measured[shared], strict=True))
    note = f"a core each was faster in {pairs} of {len(measured[apart])} pairs"
    return [*figures, at_least("order as predicted", float(same_order), "", 1.0, note)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of each run; above {2 * EDGE_STEPS}")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.steps <= 2 * EDGE_STEPS:
        parser.error(f"--steps ({options.steps}) must be above {2 * EDGE_STEPS}: the first and last do not count")
    if len(os.sched_getaffinity(0)) < 2:
        print("skipped: this machine has one core, but two devices need two", file=sys.stderr)
        return
    load = os.getloadavg()[0]
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as directory:
        write_data(Path(directory) / "train.parquet", options.steps * BATCH)
        predicted, alone = predict(options.steps, directory)
        measured: dict[str, list[float]] = {placement.name: [] for placement in PLACEMENTS}
        for number in range(options.repeats):
            for placement in PLACEMENTS if number % 2 == 0 else PLACEMENTS[::-1]:
                rate = measured_rate(placement, number, options.steps, directory)
                measured[placement.name].append(rate)
                print(json.dumps({"run": number, "placement": placement.name, "rate": rate}), file=sys.stderr)
    ray.shutdown()
    emit("plan_real", figures_of(predicted, alone, measured, load), options.json)


if __name__ == "__main__":
    main()
