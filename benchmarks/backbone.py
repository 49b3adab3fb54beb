"""The backbone's training step on packed sequences, beside plain Hugging Face loops on the same machine.

python benchmarks/backbone.py [--model NAME ...] [--dtype float32 bfloat16] [--trace CSV] [--repeats N] [--json]

Compared, step by step in turn: (a) FlowTrain's trainer on packed microbatches; (b) a plain HF loop on the same samples,
padded; (c) a plain HF loop on as many tokens in batches of equal sequences, so that nothing is padded or masked: the
upper bound. All train the same model from the same weights with fused AdamW, clipping and HF's loss; one thread each.
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
from _backbone_data import Mix, draw_lengths, full_step, packed_step, padded_step
from _backbone_runs import MODELS, Ours, PlainHF, Setting, specs_of
from _report import Figure, at_least, commit, emit
from rich.console import Console

from flowtrain.costs.flops import backbone_training_flops
from flowtrain.training.batch import IGNORED_LABEL
from flowtrain.training.peak import device_peak

OURS, PADDED, FULL = "packed", "hf_padded", "hf_full"
TARGET_OF_FULL = 0.95
LOSS_TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-3}


class WrongResult(Exception):
    """Two that train on the same samples disagree."""


@dataclass
class Measured:
    """One contestant's steps. wall_s, busy_s: of each, by the clock and by the processor.

    tokens: real ones of each step; flops: theirs. computed: tokens including padding.
    """

    wall_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    flops: list[float] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)

    def rates(self, seconds: list[float]) -> np.ndarray:
        """Real tokens/s of each step."""
        return np.array(self.tokens) / np.array(seconds)


@dataclass(frozen=True)
class Prepared:
    """A step that waits for being run; run returns its loss. lengths: of the sequences; the rest as in `Measured`."""

    run: Callable[[], float]
    lengths: tuple[int, ...]
    num_targets: int
    computed: int


def prepare(
    mix: Mix, step: int, args: argparse.Namespace, ours: Ours, padded: PlainHF, full: PlainHF
) -> dict[str, Prepared]:
    """The three contestants' work of one step."""
    plan, packed = packed_step(mix, step, args.capacity, torch.device("cpu"))
    rows, groups = padded_step(mix, step, args.padded_batch), full_step(mix, step, args.capacity)
    lengths, targets = mix.lengths[step], plan.num_target_tokens
    full_targets = sum(int((batch.labels[:, 1:] != IGNORED_LABEL).sum()) for batch in groups)
    equal = tuple(length for batch in groups for length in [batch.input_ids.shape[1]] * len(batch.input_ids))
    return {
        OURS: Prepared(lambda: ours.step(plan, packed), lengths, targets, plan.num_tokens),
        PADDED: Prepared(lambda: padded.step(rows), lengths, targets, sum(batch.input_ids.numel() for batch in rows)),
        FULL: Prepared(lambda: full.step(groups), equal, full_targets, sum(equal)),
    }


def measure(model: str, dtype: str, args: argparse.Namespace, console: Console) -> tuple[dict[str, Measured], float]:
    """Run the contestants in turn, a warm-up first, in another order every time; returns the peak FLOP/s too.

    The peak is taken again at every step, and the highest counts: other work on the machine only lowers it.
    """
    setting = Setting(model, dtype, args.threads, torch.device("cpu"), {})
    spec, _ = specs_of(model)
    drawn = draw_lengths(args.trace, args.repeats + 1, args.samples, args.longest, args.scale)
    mix = Mix(drawn, spec.vocab_size, args.target_share)
    peak_flops = 0.0
    ours = Ours(setting)
    try:
        contestants = {PADDED: PlainHF(setting), FULL: PlainHF(setting)}
        measured = {name: Measured() for name in (OURS, PADDED, FULL)}
        for step in range(args.repeats + 1):
            work = prepare(mix, step, args, ours, contestants[PADDED], contestants[FULL])
            names = [OURS, PADDED, FULL]
            losses = {}
            peak_flops = max(peak_flops, device_peak(torch.device("cpu"), getattr(torch, dtype)).flops)
            for name in names[step % 3 :] + names[: step % 3]:
                losses[name], wall_s, busy_s = timed(work[name].run)
                if step == 0:
                    continue
                note(measured[name], work[name], wall_s, busy_s)
                measured[name].flops.append(
                    backbone_training_flops(spec, work[name].lengths, num_target_tokens=work[name].num_targets)
                )
            check_losses(losses, dtype)
            shown = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
            console.print(f"{model} {dtype} step {step}: loss {shown}", highlight=False, soft_wrap=True)
    finally:
        ours.close()
    return measured, peak_flops


def timed(run: Callable[[], float]) -> tuple[float, float, float]:
    """Loss, wall and processor seconds of a step; garbage of the others is no part of it."""
    gc.collect()
    wall, busy = time.perf_counter(), time.process_time()
    loss = run()
    return loss, time.perf_counter() - wall, time.process_time() - busy


def note(measured: Measured, work: Prepared, wall_s: float, busy_s: float) -> None:
    """Take down a step."""
    measured.wall_s.append(wall_s)
    measured.busy_s.append(busy_s)
    measured.tokens.append(sum(work.lengths))
    measured.computed.append(work.computed)


def check_losses(losses: dict[str, float], dtype: str) -> None:
    """Packed and padded train on the same samples from the same weights."""
    ours, theirs = losses[OURS], losses[PADDED]
    if not abs(ours - theirs) <= LOSS_TOLERANCE[dtype] * abs(theirs):
        raise WrongResult(f"{dtype}: the loss on packed sequences is {ours}, on padded rows {theirs}")


def figures(label: str, measured: dict[str, Measured], peak_flops: float) -> list[Figure]:
    """Rates and MFU of everybody, and ours over theirs."""
    found = []
    for name, each in measured.items():
        rates, mfu = each.rates(each.wall_s), np.array(each.flops) / np.array(each.wall_s) / peak_flops
        padding = 1.0 - sum(each.tokens) / sum(each.computed)
        found.append(figure(f"{label}.{name}.tokens_per_s", rates, "tokens/s", f"padding {100 * padding:.1f} %"))
        found.append(figure(f"{label}.{name}.mfu", mfu, "1", f"over {peak_flops / 1e9:.1f} GFLOP/s, measured"))
    for other, target in ((FULL, TARGET_OF_FULL), (PADDED, None)):
        for clock in ("busy_s", "wall_s"):
            ours, theirs = (each.rates(getattr(each, clock)) for each in (measured[OURS], measured[other]))
            by_wall = clock == "wall_s"
            found.append(
                figure(
                    f"{label}.{OURS}_over_{other}" + (".wall" if by_wall else ""),
                    ours / theirs,
                    "1",
                    "by wall time" if by_wall else "by processor time",
                    None if by_wall else target,
                )
            )
    return found


def figure(name: str, values: np.ndarray, unit: str, note: str, least: float | None = None) -> Figure:
    """The median, with the quartiles in the note."""
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    note = f"quartiles {low:.4g} to {high:.4g} of {len(values)}; {note}"
    if least is None:
        return Figure(name, float(middle), unit, note=note)
    return at_least(name, float(middle), unit, least, note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["small", "smollm2-135m"], choices=sorted(MODELS))
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--trace", type=Path, metavar="CSV", help="columns num_image_tiles,num_tokens")
    parser.add_argument("--capacity", type=int, default=2048, help="tokens of a packed microbatch")
    parser.add_argument("--longest", type=int, default=1536, help="longer samples are cut")
    parser.add_argument("--scale", type=float, default=0.5, help="of the lengths")
    parser.add_argument("--samples", type=int, default=8, help="of a step")
    parser.add_argument("--padded-batch", type=int, default=8, help="rows of a padded batch")
    parser.add_argument("--target-share", type=float, default=1.0, help="of a sample's tokens that carries loss")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
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
