"""All modes on one accelerator, whole runs under Ray: tokens/s, MFU, starved share, device memory, bytes by transport.

python benchmarks/modes_gpu.py [--model quickstart|1.7b] [--variants NAME ...] [--steps N] [--keep DIRECTORY] [--json]

All variants train the same samples from the same random weights, one run after the other. Encoders and the backbone's
rank share the device. ``1.7b`` is a SigLIP so400m tower at 378 pixels before Qwen3-1.7B, in bfloat16, on samples with
the lengths of ai2d. The first and the last steps do not count. Exits with 1 if first losses differ, if features with a
device tier are not read from it, or if a run fails; without an accelerator it prints a line and exits with 0.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import ray
import torch
import yaml
from _backbone_runs import MODELS
from _modes_data import TOKENIZER, TOKENS_PER_TILE, mix_of, write_samples
from _report import Figure, emit
from shared.random_tower import RANDOM_TOWER
from transformers import AutoTokenizer

from flowtrain.config.load import load_config
from flowtrain.controller.run import run_training
from flowtrain.errors import FlowTrainError
from flowtrain.observability.metrics import read_metrics

WARM_UP, ENDING = 5, 3
"""Steps of a run that are not measured, at its start and its end."""
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-3}
SO400M = {
    "model_type": "siglip_vision_model",
    "image_size": 378,
    "patch_size": 14,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
}
SHARED = ("encoders.vision.num_devices=0.4", "backbone.num_devices=0.6")
HBM = "pool.hbm_segment_nbytes=1073741824"
VARIANTS: dict[str, tuple[str, ...]] = {
    "monolithic": ("mode=monolithic",),
    "colocated": ("mode=colocated",),
    "colocated_hbm": ("mode=colocated", HBM),
    "decoupled": ("mode=decoupled", *SHARED),
    "decoupled_hbm": ("mode=decoupled", *SHARED, HBM),
    "disaggregated": ("mode=disaggregated", *SHARED),
    "llm_only": ("mode=llm_only",),
}


@dataclass(frozen=True)
class Shape:
    """A model from its configuration alone, and its steps."""

    encoder: dict[str, Any]
    backbone: dict[str, Any]
    dtype: str
    image_tokens: int
    microbatch_tokens: int
    max_batch_patches: int
    batch: int

    def document(self, samples: Path, runs_dir: Path, steps: int) -> dict[str, Any]:
        """The configuration that all variants change."""
        return {
            "name": "base",
            "runs_dir": str(runs_dir),
            "model": {"tokenizer": TOKENIZER, "dtype": self.dtype},
            "encoders": {
                "vision": {
                    "config": self.encoder,
                    "feature_layer": -1,
                    "max_batch_patches": self.max_batch_patches,
                    "segment_nbytes": 1 << 30,
                    "num_threads": 2,
                }
            },
            "backbone": {"config": self.backbone, "num_threads": 4},
            "data": {
                "sources": [{"path": str(samples)}],
                "max_seq_len": self.microbatch_tokens,
                "max_image_nbytes": 1 << 20,
                "shuffle": "none",
            },
            "training": {
                "global_batch_size": self.batch,
                "max_steps": steps,
                "learning_rate": 1e-5,
                "lr_schedule": "constant",
                "max_grad_norm": 1.0,
            },
            "scheduler": {"microbatch_tokens": self.microbatch_tokens},
            "checkpoint": {"every_steps": 100_000, "at_end": False},
            "observability": {"progress": "off", "dashboard": False},
        }


def shapes() -> dict[str, Shape]:
    """What can be measured, by name."""
    small = load_config(Path(__file__).resolve().parents[1] / "configs" / "quickstart.yaml").backbone.config
    assert small is not None
    large = MODELS["qwen3-1.7b"].to_diff_dict()
    return {
        "quickstart": Shape(RANDOM_TOWER, small, "float32", 49, 512, 392, 12),
        "1.7b": Shape(SO400M, {**large, "model_type": "qwen3"}, "bfloat16", 729, 8192, 16 * 729, 16),
    }


@contextmanager
def device_memory() -> Iterator[list[int]]:
    """MiB in use on the device by all processes, sampled while the block runs; empty without ``nvidia-smi``."""
    seen: list[int] = []
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-lms", "200"]
    try:
        watcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except FileNotFoundError:
        yield seen
        return
    try:
        yield seen
    finally:
        watcher.terminate()
        out, _ = watcher.communicate()
        seen += [int(line) for line in out.split() if line.isdigit()]


def run(base: Path, name: str, overrides: tuple[str, ...]) -> tuple[list[dict[str, Any]], int]:
    """Train one variant; returns the lines of its metrics and the peak of the device's memory in MiB."""
    config = load_config(base, [f"name={name}", *overrides])
    with device_memory() as seen:
        summary = run_training(config)
    return list(read_metrics(summary.directory / "metrics.jsonl")), max(seen, default=0)


def figures_of(name: str, lines: list[dict[str, Any]], peak_mib: int) -> list[Figure]:
    """What one run did between its first and its last steps."""
    window = lines[WARM_UP:-ENDING]
    seconds = window[-1]["timestamp"] - lines[WARM_UP - 1]["timestamp"]
    steps = sorted(line["step_time_s"] for line in window)
    transports: dict[str, int] = {}
    for line in window:
        for transport, nbytes in line["read_nbytes_by_transport"].items():
            transports[transport] = transports.get(transport, 0) + nbytes
    read = ", ".join(f"{each} {nbytes / len(window) / 1e6:.1f}" for each, nbytes in sorted(transports.items()))
    rate = sum(line["num_tokens"] for line in window) / seconds
    note = f"{len(window)} steps; first loss {lines[0]['loss']:.5f}"
    found = [
        Figure(f"{name}.tokens_per_s", rate, "tokens/s", note=note),
        Figure(f"{name}.step_time", median(steps), "s", note=f"{steps[0]:.3f} to {steps[-1]:.3f}"),
        Figure(f"{name}.starved_share", sum(line["starved_s"] for line in window) / seconds, "1"),
        Figure(f"{name}.device_memory", peak_mib, "MiB", note="peak of all processes"),
        Figure(f"{name}.read", sum(transports.values()) / len(window) / 1e6, "MB/step", note=read),
    ]
    for key in ("mfu", "backbone_mfu"):
        if all(line[key] is not None for line in window):
            found.append(Figure(f"{name}.{key}", fmean(line[key] for line in window), "1"))
    return found


def faults_of(found: dict[str, list[dict[str, Any]]], tolerance: float) -> list[str]:
    """What the runs show to be wrong, in words."""
    faults = []
    losses = {name: lines[0]["loss"] for name, lines in found.items() if name != "llm_only"}
    if losses and max(losses.values()) - min(losses.values()) > tolerance * max(losses.values()):
        faults.append(f"first losses differ by more than {tolerance:g}: {losses}")
    for name, lines in found.items():
        read = sum(line["read_nbytes_by_transport"].get("device_ipc", 0) for line in lines)
        if name.endswith("_hbm") and not read:
            faults.append(f"{name}: no feature was read from device memory")
    return faults


def measure(args: argparse.Namespace, scratch: Path) -> tuple[list[Figure], list[str]]:
    """Run all variants; returns figures and what went wrong."""
    shape = shapes()[args.model]
    mix = mix_of("ai2d", args.trace, shape.batch * args.steps, shape.image_tokens / TOKENS_PER_TILE)
    samples = scratch / "train.parquet"
    write_samples(mix, AutoTokenizer.from_pretrained(TOKENIZER), samples)
    base = scratch / "base.yaml"
    base.write_text(yaml.safe_dump(shape.document(samples, args.keep or scratch, args.steps)))
    figures: list[Figure] = []
    failed: list[str] = []
    found: dict[str, list[dict[str, Any]]] = {}
    for name in args.variants:
        try:
            lines, peak_mib = run(base, f"{args.model}-{name}", (*VARIANTS[name], *args.set))
        except FlowTrainError as error:
            failed.append(f"{name}: {error}")
            traceback.print_exc()
            continue
        found[name] = lines
        own = figures_of(name, lines, peak_mib)
        print(", ".join(f"{each.name} {each.value:.4g}" for each in own), file=sys.stderr, flush=True)
        figures += own
    return figures, failed + faults_of(found, LOSS_TOLERANCE[shape.dtype])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1.7b", choices=("quickstart", "1.7b"))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--trace", type=Path, help="ai2d.csv; default: lengths drawn with its statistics")
    parser.add_argument("--keep", type=Path, help="where to keep the runs' directories")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides for every variant")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.steps <= WARM_UP + ENDING:
        parser.error(f"--steps ({args.steps}) must be above {WARM_UP + ENDING}, which are not measured")
    if not torch.accelerator.is_available():
        sys.stderr.write("modes_gpu: skipped, torch sees no accelerator on this machine\n")
        return
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            figures, faults = measure(args, Path(scratch))
    finally:
        ray.shutdown()
    emit(f"modes_gpu {args.model}", figures, args.json)
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
