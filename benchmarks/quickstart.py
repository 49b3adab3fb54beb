"""The quickstart as a user runs it: `flowtrain train configs/quickstart.yaml`, from command to checkpoint.

python benchmarks/quickstart.py [--steps N] [--json]
"""

from __future__ import annotations

import argparse
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="number of steps instead of the quickstart's own")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        overrides = [f"runs_dir={scratch}"] + ([f"training.max_steps={args.steps}"] if args.steps else [])
        command = [sys.executable, "-m", "flowtrain.cli.app", "train", "configs/quickstart.yaml", *overrides]
        started = time.monotonic()
        subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
        figures = measure(Path(scratch) / "quickstart", time.monotonic() - started)
    emit("quickstart", figures, args.json)


if __name__ == "__main__":
    main()
