"""Random samples through a pool far smaller than their sum, while its producers are killed at random moments.

python benchmarks/soak.py [--samples N] [--kills N] [--seed N] [--json]

Two feeders and three encoders are separate processes; flow, planner and two reading ranks are in this one. Every
position must be consumed once, every part must have the bytes that were put, and every producer's books must agree with
its pool after each order. Exits with 1 if one of these fails.
"""

from __future__ import annotations

import argparse
import sys
from statistics import mean

from _soak import Soak
from _soak_world import POOL_SHARE, Result, WrongResult


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        result = Soak(options.samples, options.kills, options.seed).run()
    except WrongResult as fault:
        print(f"soak: {fault}", file=sys.stderr)
        return 1
    report(result, options.samples, options.kills, options.json)
    return 0


def report(result: Result, samples: int, kills: int, as_json: bool) -> None:
    from _report import Figure, at_least, emit  # imports torch, which the producer processes do not need

    bent = result.fragmentation
    figures = [
        at_least("positions consumed once", result.num_consumed, "positions", samples),
        at_least("SIGKILLs of producers", result.num_kills, "kills", kills, "of two feeders and three encoders"),
        at_least("bytes put / bytes of the pool", result.sum_nbytes / result.pool_nbytes, "x", POOL_SHARE),
        Figure("parts verified by checksum", result.num_verified, "parts"),
        Figure("parts made again", result.num_remade, "parts", note="their owner was killed"),
        Figure("reads of an owner that was gone", result.num_lost_reads, "reads", note="asked again by position"),
        Figure("free + used = bound", result.num_balances, "reports", note="against each producer's own books"),
        Figure(
            "fragmentation, mean", mean(bent or [0.0]), "", note="1 - largest free run / free bytes, over a tenth free"
        ),
        Figure("fragmentation, worst", max(bent, default=0.0), ""),
        Figure("parts in several extents", result.num_split_parts / result.num_verified, ""),
        Figure("most extents of a part", result.most_extents, "extents"),
        Figure("pool", result.pool_nbytes / 2**20, "MiB"),
        Figure("duration", result.duration_s, "s"),
    ]
    emit("soak", figures, as_json)


if __name__ == "__main__":
    sys.exit(main())
