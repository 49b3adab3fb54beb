"""The backbone's training step on packed sequences, against a plain Hugging Face loop on the same machine.

python benchmarks/backbone.py [--model NAME ...] [--dtype bfloat16 float32] [--trace CSV] [--repeats N] [--json]

(a) FlowTrain's trainer on packed microbatches takes turns with (c) a plain HF loop on the same samples in batches of
equal sequences. There nothing is padded or masked, so it is the upper bound. For this the lengths of a step are made
equal in each batch; a packed microbatch mixes samples of several batches. In some steps (a) also takes turns with (b)
the plain loop on padded batches, over the original lengths. All train the same model from the same weights with fused
AdamW, clipping and HF's loss, on the same number of threads; losses must agree.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from _backbone_runs import MODELS, Ours, PlainHF, Setting, specs_of
from _report import Figure, at_least, commit, emit
from rich.console import Console
from shared.backbone_data import Mix, PlainBatch, draw_lengths, full_step, made_equal, packed_step, padded_step

from flowtrain.costs.flops import backbone_training_flops
from flowtrain.training.peak import device_peak

FULL, PADDED = "hf_full", "hf_padded"
TARGETS = {FULL: 0.95, PADDED: None}
LOSS_TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-3}
CPU = torch.device("cpu")


class WrongResult(Exception):
    """Two trainers disagree on the same samples."""


@dataclass
class Measured:
    """Steps of two trainers on the same samples; FlowTrain's is first in each pair.

    wall_s, busy_s: wall and processor seconds of each. tokens, flops: of a step. computed: tokens of a plain step,
    including padding.
    """

    wall_s: list[tuple[float, float]] = field(default_factory=list)
    busy_s: list[tuple[float, float]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    flops: list[float] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Contest:
    """Two models that are trained in the same way."""

    model: str
    dtype: str
    ours: Ours
    plain: PlainHF
    console: Console

    def run(self, step: int, name: str, mix: Mix, batches: list[PlainBatch], capacity: int, into: Measured) -> None:
        """One step of both, in alternating order; the first step only warms up."""
        plan, packed = packed_step(mix, step, capacity, CPU)
        turns = [(0, lambda: self.ours.step(plan, packed)), (1, lambda: self.plain.step(batches))]
        losses, wall_s, busy_s = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]
        for index, turn in turns if step % 2 else reversed(turns):
            losses[index], wall_s[index], busy_s[index] = timed(turn)
        check_losses(losses, self.dtype, name)
        self.console.print(
            f"{self.model} {self.dtype} step {step}: packed and {name} {wall_s[0]:.1f} and {wall_s[1]:.1f} s by the "
            f"clock, {busy_s[0]:.1f} and {busy_s[1]:.1f} s of the processor; {plan.num_tokens} tokens in "
            f"{len(packed)} microbatches and {len(batches)} batches; loss {losses[0]:.4f}",
            highlight=False,
            soft_wrap=True,
        )
        if step == 0:
            return
        spec, _ = specs_of(self.model)
        into.wall_s.append((wall_s[0], wall_s[1]))
        into.busy_s.append((busy_s[0], busy_s[1]))
        into.tokens.append(plan.num_tokens)
        into.flops.append(backbone_training_flops(spec, plan.lengths, num_target_tokens=plan.num_target_tokens))
        into.computed.append(sum(batch.input_ids.numel() for batch in batches))


def measure(model: str, dtype: str, args: argparse.Namespace, console: Console) -> tuple[dict[str, Measured], float]:
    """Run both trainers in turn; also returns the highest measured peak FLOP/s, since other work lowers single ones."""
    setting = Setting(model, dtype, args.threads, CPU, {})
    drawn = draw_lengths(args.trace, args.repeats + 1, args.samples, args.longest, args.scale)
    vocabulary = specs_of(model)[0].vocab_size
    uneven = Mix(drawn, vocabulary, args.target_share)
    equal = Mix(tuple(made_equal(lengths, args.capacity) for lengths in drawn), vocabulary, args.target_share)
    measured = {FULL: Measured(), PADDED: Measured()}
    peak_flops = 0.0
    contest = Contest(model, dtype, Ours(setting), PlainHF(setting), console)
    try:
        for step in range(args.repeats + 1):
            peak_flops = max(peak_flops, device_peak(CPU, getattr(torch, dtype)).flops)
            contest.run(step, FULL, equal, full_step(equal, step, args.capacity), args.capacity, measured[FULL])
            if 0 < step <= args.padded_repeats:
                rows = padded_step(uneven, step, args.padded_batch)
                contest.run(step, PADDED, uneven, rows, args.capacity, measured[PADDED])
    finally:
        contest.ours.close()
    return measured, peak_flops


def timed(run: Callable[[], float]) -> tuple[float, float, float]:
    """Loss, wall and processor seconds of a step; garbage of earlier steps is collected before."""
    gc.collect()
    wall, busy = time.perf_counter(), time.process_time()
    loss = run()
    return loss, time.perf_counter() - wall, time.process_time() - busy


def check_losses(losses: list[float], dtype: str, name: str) -> None:
    """Raise WrongResult if the losses differ: both train on the same samples from the same weights."""
    ours, theirs = losses
    if not abs(ours - theirs) <= LOSS_TOLERANCE[dtype] * abs(theirs):
        raise WrongResult(f"{dtype}: the loss on packed sequences is {ours}, that of {name} {theirs}")


def figures(label: str, measured: dict[str, Measured], peak_flops: float) -> list[Figure]:
    """Rates and MFU of all trainers, and FlowTrain's over the others'."""
    found = []
    for name, each in measured.items():
        if not each.wall_s:
            continue
        tokens, flops, wall_s, busy_s = (
            np.array(values) for values in (each.tokens, each.flops, each.wall_s, each.busy_s)
        )
        padding = 1.0 - sum(each.tokens) / sum(each.computed)
        for who, index, note in ((f"packed_beside_{name}", 0, "nothing padded"), (name, 1, f"padding {padding:.1%}")):
            rates, mfu = tokens / wall_s[:, index], flops / wall_s[:, index] / peak_flops
            found.append(figure(f"{label}.{who}.tokens_per_s", rates, "tokens/s", note))
            found.append(figure(f"{label}.{who}.mfu", mfu, "1", f"over {peak_flops / 1e9:.1f} GFLOP/s, measured"))
        over = f"{label}.packed_over_{name}"
        found.append(figure(f"{over}.wall", wall_s[:, 1] / wall_s[:, 0], "1", "by the clock", TARGETS[name]))
        found.append(figure(over, busy_s[:, 1] / busy_s[:, 0], "1", "by processor time", TARGETS[name]))
    return found


def figure(name: str, values: np.ndarray, unit: str, note: str, least: float | None = None) -> Figure:
    """The median, with the quartiles in the note."""
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    note = f"quartiles {low:.4g} to {high:.4g} of {len(values)}; {note}"
    if least is None:
        return Figure(name, float(middle), unit, note=note)
    return at_least(name, float(middle), unit, least, note)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["smollm2-135m"], choices=sorted(MODELS))
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--trace", type=Path, metavar="CSV", help="columns num_image_tiles,num_tokens")
    parser.add_argument("--capacity", type=int, default=2048, help="tokens of a packed microbatch and of a full batch")
    parser.add_argument("--longest", type=int, default=1536, help="longer samples are cut")
    parser.add_argument("--scale", type=float, default=0.5, help="factor of the lengths")
    parser.add_argument("--samples", type=int, default=10, help="samples of a step")
    parser.add_argument("--padded-batch", type=int, default=4, help="rows of a padded batch")
    parser.add_argument("--target-share", type=float, default=1.0, help="share of a sample's tokens that carries loss")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7, help="steps against full batches, plus one to warm up")
    parser.add_argument("--padded-repeats", type=int, default=2, help="of these steps, against padded batches too")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.longest > args.capacity:
        parser.error(f"--longest ({args.longest}) must be at most --capacity ({args.capacity}), which holds it whole")
    return args


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    console = Console(stderr=args.json)
    console.print(f"backbone ({commit()}), {args.threads} threads")
    found = []
    for model in args.model:
        for dtype in args.dtype:
            try:
                measured, peak_flops = measure(model, dtype, args, console)
            except WrongResult as error:
                sys.exit(f"wrong result: {error}")
            found += figures(f"{model}.{dtype}", measured, peak_flops)
    emit("backbone", found, args.json)


if __name__ == "__main__":
    main()
