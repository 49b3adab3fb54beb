"""The start of a run of 256 ranks on 32 nodes, and what its coordinator costs a second; ranks and nodes are emulated.

python benchmarks/startup.py [--steps N] [--quick] [--json]

A command starts the real controller, Ray, and the real coordinator as a Ray actor. 256 backbone ranks, 32 encoders and
4 feeders are emulated, many in a process, on 32 emulated nodes; all their questions are real Ray calls. A step of 1,024
samples has 4 microbatches a rank and takes a second. Two shapes: dp=32 tp=8, and dp=256, where every rank asks for
itself. The coordinator's figure is the processor time of its process in a steady step.

Not in the seconds to the first microbatch, since emulated actors do not do it: a process for each actor with its
imports, weights, process groups, connections of the pool between hosts. These connections are measured apart, between
network namespaces (real NIXL over TCP).
Exits with 1 if a run fails or a position is not consumed exactly once.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from statistics import median

from _report import Figure, at_most, emit
from _startup_nixl import NUM_HOSTS, Handshakes
from _startup_nixl import measure as measure_handshakes
from _startup_run import Measured, Shape, measure

SHAPES = {"dp32_tp8": Shape(dp=32, tp=8), "dp256": Shape(dp=256, tp=1)}
QUICK = {"quick": Shape(dp=2, tp=2, num_encoders=2, num_feeders=2, num_nodes=2, num_processes=1, batch_size=32)}
CPU_TARGET = 0.3
"""Processor seconds of the coordinator a second."""


def figures_of(name: str, shape: Shape, measured: Measured) -> Iterator[Figure]:
    """The figures of one emulated run."""
    what = f"{shape.num_ranks} emulated ranks, {shape.num_encoders} emulated encoders, {shape.num_nodes} emulated nodes"
    load = f"load average {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores"
    yield Figure(f"{name}/first_microbatch", measured.last_s, "s", note=f"of the last replica; {what}; {load}")
    yield Figure(f"{name}/first_microbatch_of_any", measured.first_s, "s")
    for (phase, start_s), (_, end_s) in pairwise([*measured.phases.items(), ("", measured.first_s)]):
        yield Figure(f"{name}/phase: {phase}", end_s - start_s, "s")
    per_step = sum(measured.calls.values()) / measured.num_steps
    calls = ", ".join(f"{each} {count / measured.num_steps:.1f}" for each, count in sorted(measured.calls.items()))
    pace = f"steps of {measured.step_s:.2f} s; {load}"
    yield at_most(f"{name}/coordinator", measured.cpu_s, "CPU s/s", CPU_TARGET, f"CPU seconds a step; {pace}")
    yield Figure(f"{name}/questions", per_step, "1/step", note=calls)
    yield Figure(f"{name}/controller", measured.controller_cpu_s, "CPU s/s", note=pace)


def handshake_figures(found: Handshakes, shape: Shape) -> Iterator[Figure]:
    """The figures of connections between hosts; the last one computes those of the emulated run."""
    others = NUM_HOSTS - 1
    note = f"real NIXL over TCP, {NUM_HOSTS} network namespaces"
    batch = f"one extent from each of {others} other hosts"
    yield _times("nixl/open_segment", found.offer_s, f"imports included; {note}")
    yield _times("nixl/open_reader", found.agent_s, note)
    yield _times("nixl/first_read", found.first_s, f"{batch}, with {others} handshakes")
    yield _times("nixl/next_read", found.next_s, batch)
    yield _times("nixl/first_read_of_all", found.crowd_s, f"{len(found.crowd_s)} readers at once, {batch}")
    counted = f"open TCP connections between hosts, both ends; {len(found.first_s)} readers"
    yield Figure("nixl/connections_at_start", found.at_start, "1", note=f"{counted}, {NUM_HOSTS} owners")
    yield Figure(
        "nixl/connections_after_reads", found.after_reads, "1", note=f"{counted} have read from {others} owners"
    )
    owners = shape.num_encoders + shape.num_feeders
    in_all = (shape.num_ranks * owners + shape.num_encoders * shape.num_feeders) * (1 - 1 / shape.num_nodes)
    yield Figure("nixl/in_all", in_all, "handshakes", note="computed: every rank reads once from every owner elsewhere")


def _times(name: str, seconds: list[float], note: str) -> Figure:
    return Figure(name, 1e3 * median(seconds), "ms", note=f"up to {1e3 * max(seconds):.0f}; {note}")


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=32, help="of each emulated run")
    parser.add_argument("--quick", action="store_true", help="one tiny emulated run, to see that it works")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    figures: list[Figure] = []
    for name, shape in (QUICK if args.quick else SHAPES).items():
        shape = replace(shape, num_steps=8 if args.quick else args.steps)
        figures += figures_of(name, shape, measure(shape))
    found = None if args.quick else measure_handshakes()
    if found is not None:
        figures += handshake_figures(found, SHAPES["dp32_tp8"])
    emit("startup", figures, args.json)


if __name__ == "__main__":
    main()
