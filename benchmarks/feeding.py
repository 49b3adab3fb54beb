"""Samples from storage into the pool: bytes read over payload, samples a second of a feeder, its memory, its start.

python benchmarks/feeding.py [--data DIRECTORY] [--gigabytes N] [--rounds N] [--peers-python PATH] [--no-run] [--json]

The data is made first (``_feeding_data.py``), in a temporary directory, or in --data, where it stays. It is read once
before anything is timed: all meet a warm page cache. Each round runs one feeder on one core, two feeders on a core
each, and every peer on one core, in new processes. A feeder delivers more than a peer: it also tokenises, sizes, and
copies into shared memory. scripts/install_feeding_peers.sh makes the peers' environment.
Exits with 1 if a feeder or a run fails, or leaves samples out.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from _feeding_counted import counted, counting
from _feeding_data import DataSet, large_files, small_files, warm
from _feeding_driver import feed
from _feeding_feeder import UNIT_POSITIONS, Fed, Job
from _feeding_peers import PEERS, ask_peer
from _feeding_run import run
from _report import Figure, at_least, at_most, emit

NUM_SMALL_FILES = 2000
SHUFFLE_BLOCKS = 16
"""Blocks that are mixed: a third of the data's, as a run on a large data set would mix a small share of its own."""
READ_TARGET = 1.1
ONE_FEEDER_TARGET = 500.0
PER_CPU_TARGET, BY_CLOCK_TARGET = 1.8, 1.5
START_TARGET_S = 5.0
OVERHEAD_TARGET_MIB = 512.0
ROWS_UNITS = 8
"""Units of ``data.shuffle: rows``, each row of which costs a block."""
MIB = 1 << 20
MIXED = (f"data.shuffle_blocks={SHUFFLE_BLOCKS}",)


def feeder_jobs(source: str, num_units: int, num_feeders: int, *overrides: str) -> list[Job]:
    """Feeders of one run, on a core each."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < num_feeders:
        sys.exit(f"{num_feeders} feeders need as many cores; this process may use {len(cores)}")
    chosen = (*MIXED, *overrides)
    return [Job(source, num_units, cores[number], chosen, number, num_feeders) for number in range(num_feeders)]


def feed_epoch(data: DataSet, source: str, num_feeders: int) -> list[Fed]:
    """Feed each sample of the data set once; exits if one is missing."""
    fed = feed(feeder_jobs(source, data.num_rows // UNIT_POSITIONS, num_feeders))
    if (found := sum(each.num_samples for each in fed)) != data.num_rows:
        sys.exit(f"{num_feeders} feeders delivered {found} of {data.num_rows} samples")
    return fed


def joint(fed: list[Fed]) -> Fed:
    """Feeders of one run as one: together they last as long as the slowest."""
    return replace(
        fed[0],
        num_samples=sum(each.num_samples for each in fed),
        seconds=max(each.seconds for each in fed),
        cpu_s=sum(each.cpu_s for each in fed),
    )


def feeder_figures(data: DataSet, ones: list[Fed], twos: list[list[Fed]]) -> list[Figure]:
    """One feeder, and two against one in the same round."""
    rates = [one.rate for one in ones]
    figures = [at_least("one_feeder", median(rates), "samples/s", ONE_FEEDER_TARGET, spread(rates))]
    figures.append(Figure("one_feeder_bytes", median(rates) * data.payload_nbytes / data.num_rows / 1e6, "MB/s"))
    per_cpu = [one.num_samples / one.cpu_s for one in ones]
    figures.append(Figure("one_feeder_per_cpu_second", median(per_cpu), "samples/s", note=spread(per_cpu)))
    pairs = [(one, joint(two)) for one, two in zip(ones, twos, strict=True)]
    by_cpu = [2 * (two.num_samples / two.cpu_s) / (one.num_samples / one.cpu_s) for one, two in pairs]
    by_clock = [two.rate / one.rate for one, two in pairs]
    note = f"samples per CPU second of both, times two cores; {spread(by_cpu)}"
    figures.append(at_least("two_feeders_per_cpu_second", median(by_cpu), "x", PER_CPU_TARGET, note))
    figures.append(at_least("two_feeders_by_clock", median(by_clock), "x", BY_CLOCK_TARGET, spread(by_clock)))
    return figures


def memory_figures(ones: list[Fed], twos: list[list[Fed]]) -> list[Figure]:
    """The most that a feeder takes in addition to its segment, alone and as one of two."""
    pairs, figures = [each for two in twos for each in two], []
    for name, fed in (("feeder_above_segment", ones), ("one_of_two_above_segment", pairs)):
        worst = max(fed, key=lambda each: each.resident_nbytes - each.segment_nbytes)
        resident, segment = worst.resident_nbytes / MIB, worst.segment_nbytes / MIB
        note = f"VmHWM {resident:.0f} MiB, segment {segment:.0f} MiB; also pages of libraries, which processes share"
        figures.append(at_most(name, resident - segment, "MiB", OVERHEAD_TARGET_MIB, note))
    return [
        *figures,
        Figure("feeder_own", max(one.own_nbytes for one in ones) / MIB, "MiB", note="RssAnon, sampled"),
        Figure("feeder_segment_touched", max(one.shared_nbytes for one in ones) / MIB, "MiB", note="RssShmem, sampled"),
    ]


def read_figures(data: DataSet, with_run: bool) -> list[Figure]:
    """Bytes read over payload in an epoch."""
    source, figures = counted(data.parquet), []
    with counting() as counter:
        one = joint(feed_epoch(data, source, 1))
        read_nbytes, num_fetches = counter.read()
    note = f"{num_fetches} fetches of {data.payload_nbytes / 1e6:.0f} MB"
    figures.append(at_most("read_by_one_feeder", read_nbytes / data.payload_nbytes, "x", READ_TARGET, note))
    others = one.read_nbytes - read_nbytes
    figures.append(Figure("read_uncounted", others / 1e6, "MB", note="rchar of the feeder less what was counted"))
    with counting() as counter:
        feed_epoch(data, source, 2)
        both_nbytes, num_fetches = counter.read()
    note = f"{num_fetches} fetches"
    figures.append(at_most("read_by_two_feeders", both_nbytes / data.payload_nbytes, "x", READ_TARGET, note))
    if with_run:
        ran = run(source, data.num_rows // UNIT_POSITIONS, MIXED)
        note = f"{ran.num_fetches} fetches of {ran.num_processes} processes: driver, feeders, encoders"
        figures.append(at_most("read_by_a_run", ran.read_nbytes / data.payload_nbytes, "x", READ_TARGET, note))
    return figures


def start_figures(data: DataSet, rounds: int, with_run: bool) -> list[Figure]:
    """From the start to the first sized unit, with many files."""
    found = [feed(feeder_jobs(str(data.parquet), 1, 1))[0] for _ in range(rounds)]
    note = f"{data.num_files} files; without imports"
    figures = [at_most("start", median(each.start_s for each in found), "s", START_TARGET_S, note)]
    figures.append(Figure("start_imports", median(each.import_s for each in found), "s"))
    if with_run:
        seconds = run(str(data.parquet), 1).first_unit_s
        figures.append(Figure("start_of_a_run", seconds, "s", note="Ray and all actors' imports too"))
    return figures


def rows_figures(data: DataSet) -> list[Figure]:
    """What the order of ``rows`` costs, for comparison."""
    (fed,) = feed(feeder_jobs(str(data.parquet), ROWS_UNITS, 1, "data.shuffle=rows"))
    wanted = fed.num_samples * data.payload_nbytes / data.num_rows
    return [
        Figure("rows_one_feeder", fed.rate, "samples/s", note=f"{fed.num_samples} samples"),
        Figure("rows_read", fed.read_nbytes / wanted, "x"),
    ]


def peer_figures(data: DataSet, name: str, found: list[dict[str, Any]], feeder_rates: list[float]) -> list[Figure]:
    """One peer, and a feeder against it in the same round."""
    for each in found:
        if each["num_samples"] != data.num_rows:
            sys.exit(f"{name} delivered {each['num_samples']} of {data.num_rows} samples")
    rates = [each["num_samples"] / each["seconds"] for each in found]
    ratios = [ours / theirs for ours, theirs in zip(feeder_rates, rates, strict=True)]
    mean_nbytes = found[0]["image_nbytes"] / data.num_rows
    per_cpu = median(each["num_samples"] / each["cpu_s"] for each in found)
    note = f"version {found[0]['version']}; {spread(rates)}"
    return [
        Figure(name, median(rates), "samples/s", note=note),
        Figure(f"{name}_bytes", median(rates) * mean_nbytes / 1e6, "MB/s"),
        Figure(f"{name}_per_cpu_second", per_cpu, "samples/s"),
        Figure(f"{name}_peak_memory", max(each["peak_nbytes"] for each in found) / MIB, "MiB"),
        Figure(f"one_feeder_over_{name}", median(ratios), "x", note=spread(ratios)),
    ]


def spread(values: list[float]) -> str:
    """The smallest and the largest value."""
    return f"{min(values):.3g} to {max(values):.3g} in {len(values)} rounds"


def measure(directory: Path, args: argparse.Namespace) -> list[Figure]:
    """All figures."""
    large, small = large_files(directory, args.gigabytes), small_files(directory, NUM_SMALL_FILES)
    warm(large.directory, small.directory)
    note = f"{large.num_rows} samples in {large.num_files} files, row groups of 100"
    figures = [Figure("payload", large.payload_nbytes / 1e9, "GB", note=note)]
    ones, twos = [], []
    peers: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    left_out: set[str] = set()
    core = min(os.sched_getaffinity(0))
    for number in range(args.rounds):
        ones += feed_epoch(large, str(large.parquet), 1)
        twos.append(feed_epoch(large, str(large.parquet), 2))
        for name in sorted(set(PEERS) - left_out):
            found = ask_peer(args.peers_python, name, large.directory, core)
            if isinstance(found, str):
                print(found, file=sys.stderr)
                left_out.add(name)
            else:
                peers[name].append(found)
        print(f"round {number + 1} of {args.rounds} done", file=sys.stderr)
    figures += feeder_figures(large, ones, twos) + memory_figures(ones, twos)
    for name in sorted(set(peers) - left_out):
        figures += peer_figures(large, name, peers[name], [one.rate for one in ones])
    figures += rows_figures(large) + start_figures(small, args.rounds, args.run) + read_figures(large, args.run)
    figures.append(Figure("load_average", os.getloadavg()[0], "1", note=f"of {os.cpu_count()} cores, at the end"))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="directory of the data; it is kept")
    parser.add_argument("--gigabytes", type=float, default=1.8, help="payload, in 1e9 bytes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers-python", default=sys.executable, help="interpreter that has the peers installed")
    parser.add_argument("--no-run", dest="run", action="store_false", help="leave out the runs through Ray")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    place = nullcontext(args.data) if args.data is not None else tempfile.TemporaryDirectory()
    with place as directory:
        emit("feeding", measure(Path(directory), args), args.json)


if __name__ == "__main__":
    main()
