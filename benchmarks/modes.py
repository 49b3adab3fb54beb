"""Modes and ablations side by side, on two cores: tokens/s, starved share, bytes copied, peak memory.

python benchmarks/modes.py [--traces DIRECTORY] [--models-dir DIRECTORY] [--rounds N] [--quick] [--json]

All variants train the same samples from the same weights, one run after the other in every round, each order rotated,
each process on the same two cores with one thread of torch. Models: the quickstart's and, with --models-dir (written by
scripts/real_models.py), a ViT-S/14 with the first layers of SmolLM2-135M. Samples have the lengths of ai2d.csv and
synthdog.csv in --traces, or are drawn with their statistics, scaled: an image stands for a tile. Steps while the
pipeline fills and after the encoders have ended do not count. Exits with 1 if losses differ, or if a run fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median

import _modes_actors
import ray
from _modes_data import QUICKSTART, REAL, Mix
from _modes_figures import Rounds, figures_of, ratios_of, span
from _modes_runs import LEARNING_RATE, SEARCHED, VARIANTS, Measured, Variant, Workload
from _modes_workloads import FULL, MIXES, PLANNED_DEVICES, allocated, prepare
from _report import Figure, at_least, emit

from flowtrain.errors import FlowTrainError

BENCHMARKS = Path(__file__).resolve().parent
HF = "hf_loop"
LOSS_TOLERANCE = 1e-4
QUICK_STEPS = 18


class WrongResult(Exception):
    """Two variants disagree on the same samples."""


class Bench:
    """The workloads of one model. failed: runs that ended with an error."""

    def __init__(self, label: str, workloads: dict[str, Workload], steps: int | None) -> None:
        self.label, self.workloads, self._steps = label, workloads, steps
        self.failed: list[str] = []
        self._number = 0

    def run(self, mix: str, variant: Variant, steps: int | None = None) -> Measured | None:
        """One run; None if it failed."""
        self._number += 1
        name = f"{variant.name}-{self._number}"
        try:
            found = self.workloads[mix].run(name, variant.overrides, steps or self._steps)
        except FlowTrainError as error:
            self.failed.append(f"{self.label}.{mix}.{name}: {error}")
            print(f"{self.failed[-1]}", file=sys.stderr)
            return None
        busy = ", ".join(f"{role} {1e3 * each / len(found.tokens):.0f}" for role, each in sorted(found.busy_s.items()))
        print(
            f"{self.label}.{mix}.{name}: {found.tokens_per_s:.0f} tokens/s, starved {found.starved_share:.3f}; "
            f"processor ms a step: {busy}; loss {found.losses[0]:.5f}",
            file=sys.stderr,
            flush=True,
        )
        return found

    def best_settings(self, mix: str) -> dict[str, tuple[str, ...]]:
        """The fastest settings of each variant that has several, or that has those of another."""
        best: dict[str, tuple[str, ...]] = {}
        for variant in sorted(VARIANTS, key=lambda each: each.settings_of is not None):
            given = best.get(variant.settings_of or "", ())
            rates = {}
            for setting in SEARCHED.get(variant.name, ()):
                found = self.run(mix, replace(variant, overrides=(*variant.overrides, *given, *setting)))
                if found is not None:
                    rates[setting] = found.tokens_per_s
            fastest = max(rates, key=lambda setting: rates[setting]) if rates else ()
            if given or fastest:
                best[variant.name] = (*given, *fastest)
        return best

    def rounds(self, mix: str, variants: list[Variant], number: int) -> Rounds:
        """Run all variants in turn; a failed run leaves its variant out of the pairs."""
        found: Rounds = defaultdict(list)
        for index in range(number):
            shift = index % len(variants)
            for variant in variants[shift:] + variants[:shift]:
                measured = self.run(mix, variant)
                if measured is not None:
                    found[variant.name].append(measured)
        check_losses(f"{self.label}.{mix}", found)
        return found

    def against_hf(self, number: int) -> list[Figure]:
        """Monolithic on one rank, in turn with the plain loop, on full batches."""
        workload, variant = self.workloads[FULL], next(each for each in VARIANTS if each.name == "monolithic_dp1")
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(number):
            measured = self.run(FULL, variant)
            if measured is None:
                return []
            assert measured.fill == 1.0, measured.fill
            ended_s, losses, tokens = hf_loop(workload, len(measured.losses))
            difference = abs(losses[0] - measured.losses[0]) / losses[0]
            if difference > LOSS_TOLERANCE:
                raise WrongResult(f"{self.label}: the plain loop's first loss is {losses[0]}, not {measured.losses[0]}")
            first = workload.setting.warm_up
            ours.append(measured.tokens_per_s)
            theirs.append(sum(tokens[first:]) / (ended_s[-1] - ended_s[first - 1]))
            print(f"{self.label}.{FULL}.{HF}: {theirs[-1]:.0f} tokens/s; loss {losses[0]:.5f}", file=sys.stderr)
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        label = f"{self.label}.{FULL}"
        return [
            Figure(f"{label}.monolithic_dp1.tokens_per_s", median(ours), "tokens/s", note=span(ours)),
            Figure(f"{label}.{HF}.tokens_per_s", median(theirs), "tokens/s", note=span(theirs)),
            at_least(f"{label}.monolithic_dp1_over_{HF}", median(ratios), "1", 0.95, span(ratios)),
        ]


def hf_loop(workload: Workload, steps: int) -> tuple[list[float], list[float], list[int]]:
    """Run the plain loop in a process of its own; returns each step's end, loss and tokens."""
    setting = workload.setting
    arguments = {
        "batch": workload.batch,
        "microbatch": setting.microbatch_tokens // setting.full_length,
        "steps": steps,
        "learning-rate": LEARNING_RATE,
    }
    command = [sys.executable, str(BENCHMARKS / "_modes_hf.py"), str(workload.model), str(workload.samples)]
    command += [f"--{name}={value}" for name, value in arguments.items()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    found = json.loads(done.stdout.splitlines()[-1])
    return found["ended_s"], found["losses"], found["tokens"]


def check_losses(label: str, found: Rounds) -> None:
    """Raise WrongResult unless all variants that see the images start with the same loss."""
    losses = {name: runs[0].losses[0] for name, runs in found.items() if name != "llm_only"}
    low, high = min(losses, key=losses.__getitem__), max(losses, key=losses.__getitem__)
    if losses[high] - losses[low] > LOSS_TOLERANCE * losses[high]:
        raise WrongResult(f"{label}: the first loss is {losses[low]} in {low} and {losses[high]} in {high}")


def benches(args: argparse.Namespace, scratch: Path) -> list[tuple[Bench, dict[str, Mix]]]:
    """Write checkpoints and samples of all workloads."""
    steps = QUICK_STEPS if args.quick else None
    prepared = prepare(
        scratch,
        traces=args.traces,
        models_dir=args.models_dir,
        num_layers=args.layers,
        models=args.models,
        mixes=args.mixes,
    )
    return [(Bench(each.label, each.workloads, steps), each.mixes) for each in prepared]


def given_settings(texts: list[str]) -> dict[str, tuple[str, ...]]:
    """Settings by variant, from ``VARIANT:KEY=VALUE``; ends the program if there is no such variant."""
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, _, setting = text.partition(":")
        if name not in {each.name for each in VARIANTS}:
            sys.exit(f"--settings {text}: there is no variant {name!r}")
        found[name] = (*found.get(name, ()), setting)
    return found


def measure(bench: Bench, mixes: dict[str, Mix], args: argparse.Namespace) -> list[Figure]:
    """All figures of one model."""
    chosen = [each for each in VARIANTS if not args.modes or each.name in args.modes]
    first = args.mixes[0]
    best = bench.best_settings(first) if args.search else args.settings
    variants = [replace(each, overrides=(*each.overrides, *best.get(each.name, ()))) for each in chosen]
    figures = []
    for name in args.mixes:
        planned = allocated(bench.workloads[name]) if not args.quick and not args.modes else []
        found = bench.rounds(name, variants + planned, args.rounds)
        label = f"{bench.label}.{name}"
        figures += figures_of(label, found, best, mixes[name].origin) + ratios_of(label, found, variants + planned)
    if not args.modes or "monolithic_dp1" in args.modes:
        figures += bench.against_hf(args.rounds)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, help="directory of ai2d.csv and synthdog.csv")
    parser.add_argument("--models-dir", type=Path, help="where scripts/real_models.py wrote its models")
    parser.add_argument("--layers", type=int, default=3, help="decoder layers that are kept of SmolLM2")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--models", nargs="+", choices=(QUICKSTART, REAL), help="default: all that there are")
    parser.add_argument("--mixes", nargs="+", default=list(MIXES), choices=MIXES)
    parser.add_argument("--modes", nargs="+", choices=[each.name for each in VARIANTS], help="default: all")
    parser.add_argument("--search", action="store_true", help="search the baselines' best settings first")
    parser.add_argument("--settings", nargs="+", default=[], metavar="VARIANT:KEY=VALUE", help="as a search found")
    parser.add_argument("--quick", action="store_true", help="short runs of the quickstart's model on one mix")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.settings = given_settings(args.settings)
    if args.quick:
        args.models, args.mixes = args.models or [QUICKSTART], args.mixes[:1]
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])  # all later processes inherit it
    figures: list[Figure] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        prepared = benches(args, Path(scratch))
        ray.cloudpickle.register_pickle_by_value(_modes_actors)
        ray.init(address="local", num_cpus=PLANNED_DEVICES, include_dashboard=False, log_to_driver=False)
        try:
            for bench, mixes in prepared:
                figures += measure(bench, mixes, args)
                failed += bench.failed
        finally:
            ray.shutdown()
    emit("modes", figures, args.json)
    if failed:
        sys.exit("failed runs:\n" + "\n".join(failed))


if __name__ == "__main__":
    main()
