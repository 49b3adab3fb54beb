"""How fast the simulator is: actions a second, a change timed again, many steps on many devices; on one core.

python benchmarks/simulator.py [--json]

A schedule of 64 microbatches over 16 stages with durations drawn from a seed is timed as a whole, then again and again
after the duration of one action, drawn uniformly, has changed. For a tree search, lists of twelve replicas go on from
what they share with others that have one microbatch less. A decoupled run of 1,000 steps with 256 samples each is
simulated for the plan of VLM-6B on 256 H200, through the class that a run's coordinator wraps; planning does not count.
Exits with 1 if times after a change, or from a saved state, differ from those of a new run.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from random import Random
from statistics import median

import numpy as np
from _modes_data import ROOT
from _report import Figure, at_least, at_most, emit

import flowtrain
from flowtrain.pipeline.partition import build_partition
from flowtrain.pipeline.schedules.one_f_one_b import one_f_one_b
from flowtrain.simulator.engine import NUM_SAVES, Timeline
from flowtrain.simulator.lists import program_of
from flowtrain.simulator.program import Meets, Program, side_by_side

STAGES, MICROBATCHES, CHANGES, REPLICAS = 16, 64, 3000, 12
MODEL, DEVICES, STEPS = ROOT / "configs" / "models" / "vlm_6b.yaml", 256, 1000
CHANGES_OF_RUN = ["mode=decoupled", "training.global_batch_size=256"]


def schedule() -> tuple[Program, float]:
    """The schedule as a program, and the seconds that this took."""
    partition = build_partition(2 * STAGES, STAGES)
    lists = one_f_one_b(partition, MICROBATCHES)
    started = time.perf_counter()
    program = program_of(lists, partition)
    return program, time.perf_counter() - started


def engine_figures(random: Random) -> list[Figure]:
    """Actions a second, and seconds of a change."""
    program, reading_s = schedule()
    num_actions = int((program.op < 5).sum())
    seconds = np.array([random.uniform(1.0, 2.0) for _ in range(len(program.computations))])
    transfers = np.full(len(program.transfers), 0.05)
    runs = []
    for _ in range(50):
        started = time.perf_counter()
        Timeline(program, seconds, transfers)
        runs.append(time.perf_counter() - started)
    timeline, changes = Timeline(program, seconds, transfers, num_saves=NUM_SAVES), []
    for _ in range(CHANGES):
        which, value = np.array([random.randrange(len(seconds))]), np.array([random.uniform(1.0, 2.0)])
        started = time.perf_counter()
        timeline.change(which, value)
        changes.append(time.perf_counter() - started)
        seconds[which] = value
    if not np.array_equal(timeline.ends, Timeline(program, seconds, transfers).ends):
        sys.exit("times after changes differ from those of a new run")
    spread = f"{min(changes) * 1e3:.3f} to {max(changes) * 1e3:.3f} ms in {CHANGES} changes"
    each = f"{num_actions} actions in {median(runs) * 1e3:.3f} ms"
    with_reading = num_actions / (median(runs) + reading_s)
    return [
        at_least("actions_per_s", num_actions / median(runs), "1/s", 1e6, f"{each}, median of {len(runs)}"),
        Figure(
            "actions_per_s_with_reading_the_lists", with_reading, "1/s", note=f"lists read in {reading_s * 1e3:.1f} ms"
        ),
        at_most("change_s", median(changes), "s", 0.0002, spread),
    ]


def branch_figures() -> list[Figure]:
    """Seconds of lists that part from others late, against a new run."""
    partition = build_partition(2 * STAGES, STAGES)
    parent, child = (
        side_by_side([program_of(one_f_one_b(partition, count), partition, Meets("each"))] * REPLICAS, [REPLICAS])
        for count in (MICROBATCHES, MICROBATCHES + 1)
    )
    of_parent, of_child = (
        (np.where(each.computations.is_backward, 2.0, 1.0), np.full(len(each.transfers), 0.05))
        for each in (parent, child)
    )
    timeline, branches, runs = Timeline(parent, *of_parent, num_saves=NUM_SAVES), [], []
    for _ in range(20):
        started = time.perf_counter()
        branch = timeline.of_others(child, *of_child)
        branches.append(time.perf_counter() - started)
        started = time.perf_counter()
        anew = Timeline(child, *of_child, num_saves=NUM_SAVES)
        runs.append(time.perf_counter() - started)
    if not np.array_equal(branch.ends, anew.ends):
        sys.exit("times from a saved state differ from those of a new run")
    note = f"{len(child.op)} operations, of which {timeline.save().num_ops.sum()} are shared at most; a new run: "
    return [Figure("branch_s", median(branches), "s", note=f"{note}{median(runs) * 1e3:.2f} ms")]


def run_figures() -> list[Figure]:
    """Seconds of a long run on many devices."""
    report = flowtrain.simulate(MODEL, CHANGES_OF_RUN, devices=DEVICES, num_steps=STEPS)
    (mode,) = report.modes
    flow, degrees = mode.run.flow, [str(module.degrees) for module in mode.rating.modules]
    note = (
        f"{len(mode.run.steps)} steps, {report.cpu_seconds:.1f} s of processor time; {degrees[-1]} beside "
        f"{degrees[0]}; starved {mode.run.starved:.1%}, lookahead {flow.lookahead:.1f}, pool "
        f"{flow.pool_mean_nbytes / flow.pool_nbytes:.0%} in use"
    )
    return [at_most("run_s", report.seconds, "s", 10.0, note)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    emit("simulator", [*engine_figures(Random(0)), *branch_figures(), *run_figures()], args.json)


if __name__ == "__main__":
    main()
