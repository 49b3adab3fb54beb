"""Packing, dispatch and plan time of every method, against TRL's best-fit-decreasing and Axolotl's multipack.

python benchmarks/packing.py [--trace CSV ...] [--peers DIR] [--steps N] [--json]

A trace is a CSV with the columns num_image_tiles,num_tokens. The peers come from scripts/install_packing_peers.sh.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from _contenders import (
    DEFAULT,
    ZIGZAG,
    Outcome,
    WrongResult,
    all_contenders,
    check,
    fewest_bins,
    figures,
    rules_of,
    run,
)
from _lengths import MIXTURES, Workload, drawn_statistics, log_normal_set, workload_makers
from _omnibal import omnibal_against_isf, omnibal_figures, omnibal_rows
from _peers import Peer, load_peers
from _plan_time import PlanTime, count_tokens, plan_time_figures, time_plans
from _report import Figure, at_least, at_most, commit, emit
from _tables import comparison, omnibal_table, plan_time_table, statistics_table
from rich.console import Console

from flowtrain.scheduler.packing.base import Lengths
from flowtrain.scheduler.packing.best_fit_decreasing import best_fit_decreasing
from flowtrain.scheduler.summary import pad_ratio

ROOT = Path(__file__).resolve().parents[1]
CAPACITIES = (2048, 4096, 8192, 16384, 32768)
TARGET_CAPACITIES = (8192, 32768)
"""The targets of the traces hold for these; figures of the others have no target."""
NUM_PLANS = 2000
SET_SIZE = 1_200_000
SET_CAPACITY = 8192


def balance_figures(workload: Workload, outcomes: dict[str, Outcome]) -> list[Figure]:
    """Targets of the default method: even steps and slots on the traces, never costlier than zig-zag elsewhere."""
    report, label = outcomes[DEFAULT.packing].report, workload.label
    if not workload.is_trace:
        ratios = np.round(outcomes[DEFAULT.packing].costs() / outcomes[ZIGZAG].costs(), 12)
        worst, middle, name = float(ratios.max()), float(np.median(ratios)), f"{label}.step_cost_over_zigzag"
        note = f"ours over {ZIGZAG}'s at every one of {len(ratios)} steps; median {middle:.4f}"
        asked = workload.name in MIXTURES
        most = at_most(f"{name}_max", worst, "1", 1.0, note) if asked else Figure(f"{name}_max", worst, "1", note=note)
        return [most, Figure(f"{name}_median", middle, "1")]
    found = [
        ("step_imbalance_max", 100 * report.step_imbalance.max, 0.5, ""),
        ("step_imbalance_median", 100 * report.step_imbalance.median, 0.1, f"{len(report.steps)} steps"),
        ("slot_imbalance_max", 100 * report.slot_imbalance.max, 1.5, ""),
        ("slot_imbalance_median", 100 * report.slot_imbalance.median, 0.3, f"{report.num_slots} slots"),
        ("step_cost_over_bound_max", 100 * report.excess.max, 1.5, f"median {100 * report.excess.median:.3f} %"),
    ]
    if workload.capacity in TARGET_CAPACITIES:
        return [at_most(f"{label}.{name}", value, "%", target, note) for name, value, target, note in found]
    return [Figure(f"{label}.{name}", value, "%", note=note) for name, value, _, note in found]


def bins_above_trl(workload: Workload, outcomes: dict[str, Outcome], trl: Peer) -> int:
    """The most bins that best-fit decreasing uses above TRL's: in a step, or over all samples at once."""
    steps = zip(outcomes["best_fit_decreasing"].num_bins, outcomes[trl.name].num_bins, strict=True)
    lengths, rules = workload.joined(), rules_of(workload.capacity)
    return max(len(best_fit_decreasing(lengths, rules)) - len(trl(lengths, rules)), *(a - b for a, b in steps))


def timed(call: Callable[[], Any], times: int) -> tuple[float, Any]:
    """Median seconds of a call, and its result."""
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        result = call()
        taken.append(time.perf_counter() - started)
    return median(taken), result


def large_set_figures(peers: list[Peer]) -> tuple[list[Figure], list[int]]:
    """Pack one large set by best-fit decreasing and by the peers; also returns FlowTrain's bins minus TRL's."""
    lengths, rules = log_normal_set(SET_SIZE, SET_CAPACITY), rules_of(SET_CAPACITY)
    some = Lengths(lengths.tokens[:1000], lengths.vision[:1000])
    bound = fewest_bins(lengths, SET_CAPACITY)
    best_fit_decreasing(some, rules)
    own_s, bins = timed(lambda: best_fit_decreasing(lengths, rules), 5)
    check("the large set, best_fit_decreasing", bins, lengths, rules)
    note = f"{SET_SIZE} log-normal lengths at {SET_CAPACITY} on one core, median of 5"
    found = [
        at_most("set.best_fit_decreasing.time", own_s, "s", 1.0, note),
        Figure("set.best_fit_decreasing.bins_over_bound", len(bins) / bound, "1", note=f"{len(bins)} bins"),
    ]
    extra = []
    for peer in peers:
        peer(some, rules)  # compiles
        peer_s, packed = timed(peer.prepare(lengths, SET_CAPACITY), 1)
        theirs = peer.bins(lengths, packed)
        check(f"the large set, {peer.name}", theirs, lengths, rules)
        found.append(Figure(f"set.{peer.name}.time", peer_s, "s", note="the same lengths, once"))
        found.append(Figure(f"set.{peer.name}.bins_over_bound", len(theirs) / bound, "1", note=f"{len(theirs)} bins"))
        if peer.name == "trl":
            extra.append(len(bins) - len(theirs))
            found.append(at_least("set.times_faster_than_trl", peer_s / own_s, "1", 20.0, "the same lengths"))
    return found, extra


def measure(args: argparse.Namespace, console: Console) -> tuple[list[Figure], list[Figure]]:
    """Return the figures with a target or outside the tables, and the figures of the tables."""
    peers, missing = load_peers(args.peers)
    console.print(
        *([missing] if missing else []), *([] if args.trace else ["No --trace: generated lengths alone."]), sep="\n"
    )
    statistics = drawn_statistics()
    console.print(statistics_table(statistics))
    asked: list[Figure] = []
    shown = [
        Figure(f"table1.{name.replace(' ', '_')}.{key}", getattr(drawn, key), "1", note=f"paper {getattr(paper, key)}")
        for name, paper, drawn in statistics
        for key in ("mean", "median", "maximum")
    ]
    extra_bins: list[int] = []
    plan_times: list[tuple[Workload, PlanTime]] = []
    tokens = computed = 0
    for make in workload_makers(args.trace, args.steps):
        measured, omnibal = [], []
        for capacity in CAPACITIES:
            workload = make(capacity)
            console.print(f"{workload.label}: {workload.treatment}")
            outcomes = {contender.label: run(contender, workload) for contender in all_contenders(peers)}
            measured.append((workload, outcomes))
            shown.append(Figure(f"{workload.label}.num_steps", len(workload.steps), "steps", note=workload.treatment))
            shown += figures(workload, list(outcomes.values()))
            asked += balance_figures(workload, outcomes)
            counted = count_tokens(workload, outcomes[DEFAULT.packing])
            tokens, computed = tokens + counted[0], computed + counted[1]
            plan_times.append((workload, time_plans(workload, args.plans)))
            asked += plan_time_figures(*plan_times[-1])
            if workload.is_trace:
                omnibal.append((workload, omnibal_rows(workload, outcomes)))
                asked += omnibal_against_isf(*omnibal[-1])
                shown += omnibal_figures(*omnibal[-1])
            extra_bins += [bins_above_trl(workload, outcomes, peer) for peer in peers if peer.name == "trl"]
        console.print(comparison(measured), *([omnibal_table(omnibal)] if omnibal else []))
    console.print(plan_time_table(plan_times))
    note = f"{tokens} tokens of samples in all plans, {computed} computed"
    asked.append(at_most("pad_ratio", pad_ratio(tokens, computed), "1", 0.0, note))
    large, extra = large_set_figures(peers if args.steps is None else [])
    if extra_bins:
        note = f"the most of {len(extra_bins)} workloads, in a step and over all steps, and of the large set"
        worst = float(max(*extra_bins, *extra))
        asked.append(at_most("best_fit_decreasing.bins_minus_trl", worst, "bins", 0.0, note))
    return asked + large, shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, nargs="+", action="extend", default=[], metavar="CSV")
    parser.add_argument("--peers", type=Path, default=ROOT / "build/peers", metavar="DIR")
    parser.add_argument("--steps", type=int, help="steps of every workload, for a quick run that is no measurement")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.plans = NUM_PLANS if args.steps is None else min(NUM_PLANS, 10 * args.steps)
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    console = Console(stderr=args.json, width=None if sys.stdout.isatty() else 140)
    console.print(f"packing ({commit()}), on core {core}")
    try:
        asked, shown = measure(args, console)
    except WrongResult as error:
        sys.exit(f"wrong result: {error}")
    targets = [figure for figure in asked if figure.target is not None or figure.name.startswith("set.")]
    emit("packing", asked + shown if args.json else targets, args.json)


if __name__ == "__main__":
    main()
