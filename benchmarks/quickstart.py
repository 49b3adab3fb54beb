"""The quickstart as a user runs it, `flowtrain train configs/quickstart.yaml`, from command to checkpoint; its sight.

python benchmarks/quickstart.py [--steps N] [--seeds N ...] [--json]

After each run the model is exported, and `scripts/check_vision.py` scores held-out answers with the right picture and
with another one. Time, loss and overlap are those of the first seed's run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from _report import Figure, at_least, at_most, emit

from flowtrain.observability.metrics import read_metrics
from flowtrain.observability.trace import read_spans
from flowtrain.types.messages import Span

ROOT = Path(__file__).resolve().parents[1]
FLOWTRAIN = (sys.executable, "-m", "flowtrain.cli.app")


def overlap_share(spans: list[Span], inner: str, outer: str) -> float:
    """Share of the time of spans named ``inner`` during which some span named ``outer`` runs as well."""
    busy = sorted((span.start_s, span.end_s) for span in spans if span.name == outer)
    assert all(left[1] <= right[0] for left, right in pairwise(busy)), f"{outer} spans overlap each other"
    total = shared = 0.0
    for span in spans:
        if span.name == inner:
            total += span.end_s - span.start_s
            shared += sum(max(0.0, min(span.end_s, end) - max(span.start_s, start)) for start, end in busy)
    return shared / total


def measure(run: Path, duration_s: float) -> list[Figure]:
    """The figures of a finished run."""
    steps = list(read_metrics(run / "metrics.jsonl"))
    first, last = (fmean(step["loss"] for step in part) for part in (steps[:5], steps[-5:]))
    settled = steps[len(steps) // 4 :]
    rates = [step["tokens_per_s"] for step in settled]
    starved = sum(step["starved_s"] for step in settled) / sum(step["step_time_s"] for step in settled)
    overlap = overlap_share(read_spans(run / "trace.json"), "encode", "backward")
    return [
        at_most("train_duration", duration_s, "s", 300.0, "from the command to the last checkpoint"),
        at_most("loss_ratio", last / first, "1", 0.8, f"{first:.3f} to {last:.3f} in {len(steps)} steps"),
        at_least("encode_overlaps_backward", overlap, "1", 0.3, "share of encode time, from trace.json"),
        Figure("tokens_per_s", median(rates), "tokens/s", note=f"{min(rates):.0f} to {max(rates):.0f}"),
        Figure("starved_share", starved, "1", note="of the backbone's time"),
    ]


def sight(run: Path, seed: int) -> list[Figure]:
    """Export a run, and measure what a wrong picture costs on held-out pairs."""
    subprocess.run([*FLOWTRAIN, "export", str(run)], cwd=ROOT, check=True, stdout=sys.stderr)
    command = [sys.executable, "scripts/check_vision.py", str(run), "--json"]
    # It exits with 1 where the picture does not matter, which the figures show.
    printed = subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True).stdout
    found = json.loads(printed)
    note = f"{found['right']:.3f} with the right picture, {found['wrong']:.3f} with another; {found['num_pairs']} pairs"
    in_errors = found["difference"] / found["standard_error"]
    return [
        at_least(f"wrong_minus_right_seed{seed}", found["difference"], "nats/token", 0.05, note),
        at_least(f"wrong_minus_right_in_errors_seed{seed}", in_errors, "standard errors", 3.0),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="number of steps instead of the quickstart's own")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as scratch:
        overrides = [f"runs_dir={scratch}"] + ([f"training.max_steps={args.steps}"] if args.steps else [])
        for seed in args.seeds:
            command = [*FLOWTRAIN, "train", "configs/quickstart.yaml", *overrides, f"name=seed-{seed}", f"seed={seed}"]
            started = time.monotonic()
            subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
            duration_s, run = time.monotonic() - started, Path(scratch) / f"seed-{seed}"
            figures += measure(run, duration_s) if not figures else []
            figures += sight(run, seed)
    emit("quickstart", figures, args.json)


if __name__ == "__main__":
    main()
