"""Loss at the end of the quickstart in each `data.order`, beside FlowTrain's figure 9.

python benchmarks/arrival_loss.py [--steps N] [--seeds N ...] [--json]

Both orders train from the same weights on the same data, pair by pair, one pair for each seed. The loss is the mean of
the last 100 steps, as in the paper. `arrival` puts other samples into a step than `deterministic`, whatever is
ready first within `scheduler.lookahead_steps`, so single steps differ and the end should not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median

import ray
from _report import Figure, at_most, emit

from flowtrain.config.load import load_config
from flowtrain.controller.run import run_training
from flowtrain.observability.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
LAST_STEPS = 100
PAPERS = 0.0062
"""Between 0.0615 and 0.0553: FlowTrain, section 4.6."""
ORDERS = ("deterministic", "arrival")
OVERRIDES = (
    "data.eval=null",
    "checkpoint.every_steps=100000",
    "observability.progress=off",
    "observability.dashboard=false",
    "observability.trace.steps=0",
)


def final_loss(order: str, seed: int, steps: int, directory: str) -> float:
    """Train and return the mean loss of the last steps."""
    changes = [f"name={order}-{seed}", f"runs_dir={directory}", f"data.order={order}", f"seed={seed}"]
    config = load_config(ROOT / "configs" / "quickstart.yaml", [*OVERRIDES, *changes, f"training.max_steps={steps}"])
    summary = run_training(config)
    losses = [line["loss"] for line in read_metrics(summary.directory / "metrics.jsonl")]
    return fmean(losses[-LAST_STEPS:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240, help=f"of each run; above {LAST_STEPS}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.steps <= LAST_STEPS:
        parser.error(f"--steps ({args.steps}) must be above {LAST_STEPS}: the last {LAST_STEPS} steps count")
    found: dict[str, list[float]] = {order: [] for order in ORDERS}
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as directory:
        for seed in args.seeds:
            for order, losses in found.items():
                losses.append(final_loss(order, seed, args.steps, directory))
                print(f"seed {seed}, {order}: {losses[-1]:.4f}", file=sys.stderr, flush=True)
    ray.shutdown()
    figures = [
        Figure(f"final_loss_{order}", median(losses), "1", note=f"{min(losses):.4f} to {max(losses):.4f}")
        for order, losses in found.items()
    ]
    apart = [abs(other - fixed) for fixed, other in zip(*found.values(), strict=True)]
    note = f"{min(apart):.4f} to {max(apart):.4f} in {len(apart)} pairs; the paper's is {PAPERS}"
    emit("arrival_loss", [*figures, at_most("final_losses_apart", median(apart), "1", PAPERS, note)], args.json)


if __name__ == "__main__":
    main()
