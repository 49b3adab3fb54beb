"""Share of time that the backbone starves in each `data.order`, with one of two encoders five times slower.

python benchmarks/arrival.py [--repeats N] [--steps N] [--json]

Both orders run the quickstart's data and pool with the same small model, one after the other, in one Ray. Encoders and
backbone take a fixed time per batch (they sleep for most of it), so the figures show the effect of the order, not of a
machine with few cores. Exits with 1 if a ledger does not have every position once.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import ray
import torch
from _report import Figure, at_most, emit
from shared.random_tower import RANDOM_TOWER_OVERRIDES

from flowtrain.actors.backbone import BackboneRank
from flowtrain.actors.encoder import Encoder, Work
from flowtrain.actors.reading import Fetched
from flowtrain.config.load import load_config
from flowtrain.config.run import RunConfig
from flowtrain.controller.run import run_training
from flowtrain.controller.worker_group import ActorClasses
from flowtrain.observability.ledger import read_ledger
from flowtrain.observability.metrics import read_metrics
from flowtrain.types.plan import StepPlan

ROOT = Path(__file__).resolve().parents[1]

ENCODE_S = 0.16
"""Seconds of the faster encoder for a batch of up to eight images; a step has two or three such batches."""
SLOWNESS = 5
STEP_S = 0.3
WARM_UP_STEPS = 4
"""Steps that fill the pipeline; they starve in any order."""
OVERRIDES = (
    "data.eval=null",
    *RANDOM_TOWER_OVERRIDES,
    "encoders.vision.config.num_hidden_layers=1",
    "backbone.config.num_hidden_layers=1",
    "checkpoint.every_steps=100000",
    "observability.progress=off",
    "observability.dashboard=false",
)


class PacedEncoder(Encoder):
    """Takes ENCODE_S for a batch, or SLOWNESS times that if it is not the first."""

    def encode(self, work: Work) -> dict[int, list[torch.Tensor]]:
        started = time.monotonic()
        features = super().encode(work)
        pace = ENCODE_S if self._name == "encoder-0" else SLOWNESS * ENCODE_S
        time.sleep(max(0.0, pace - (time.monotonic() - started)))
        return features


class PacedRank(BackboneRank):
    """Takes STEP_S more for a step, in equal shares for its microbatches."""

    def _ran(self, plan: StepPlan, fetched: Fetched) -> None:
        time.sleep(STEP_S / plan.num_slots)
        super()._ran(plan, fetched)


def config_of(name: str, order: str, window: int, steps: int, directory: str) -> RunConfig:
    """The quickstart made small, in one order."""
    changes = [f"name={name}", f"runs_dir={directory}", f"data.order={order}", f"training.max_steps={steps}"]
    return load_config(
        ROOT / "configs" / "quickstart.yaml", [*OVERRIDES, *changes, f"scheduler.lookahead_steps={window}"]
    )


def starved_share(config: RunConfig) -> float:
    """Run, check the ledger, and return the share of the backbone's time in which it waited for data."""
    summary = run_training(config, classes=ActorClasses(encoder=PacedEncoder, backbone=PacedRank))
    num_positions = config.training.global_batch_size * summary.num_steps
    positions = read_ledger(summary.directory / "ledger.parquet")["position"].to_pylist()
    if positions != list(range(num_positions)):
        sys.exit(f"{config.name}: the ledger does not have each of {num_positions} positions once")
    steps = list(read_metrics(summary.directory / "metrics.jsonl"))[WARM_UP_STEPS:]
    return sum(step["starved_s"] for step in steps) / sum(step["step_time_s"] for step in steps)


def measure(window: int, repeats: int, steps: int) -> list[Figure]:
    """Starved shares of pairs of runs, and their ratio."""
    shares: dict[str, list[float]] = {"deterministic": [], "arrival": []}
    with tempfile.TemporaryDirectory() as directory:
        for repeat in range(repeats):
            for order, found in shares.items():
                found.append(starved_share(config_of(f"{order}-{window}-{repeat}", order, window, steps, directory)))
                print(f"W={window} {order}: starved {found[-1]:.3f}", file=sys.stderr)
    ratios = [arrival / fixed for arrival, fixed in zip(shares["arrival"], shares["deterministic"], strict=True)]
    figures = [
        Figure(f"starved_share_{order}_w{window}", median(found), "1", note=f"{min(found):.3f} to {max(found):.3f}")
        for order, found in shares.items()
    ]
    note = f"arrival / deterministic, {min(ratios):.3f} to {max(ratios):.3f} in {repeats} pairs"
    return [*figures, at_most(f"starved_ratio_w{window}", median(ratios), "1", 1.0, note)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--windows", type=int, nargs="+", default=[2], help="scheduler.lookahead_steps")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    figures = [figure for window in args.windows for figure in measure(window, args.repeats, args.steps)]
    ray.shutdown()
    emit("arrival", figures, args.json)


if __name__ == "__main__":
    main()
