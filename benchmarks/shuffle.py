"""How even the token sums of steps are when blocks are mixed, over those when any row may follow any other.

python benchmarks/shuffle.py [--trace CSV ...] [--seeds N] [--json]

Rows lie in blocks of 100. Unsorted: in the order in which they were drawn or stand in the trace. Sorted: by length, so
that all rows of a block are nearly equal, the worst case; theory: sqrt(1 + batch / mixed blocks), for endless blocks.
A trace is a CSV with num_image_tiles,num_tokens.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from _lengths import LOG_NORMAL
from _report import Figure, at_most, emit
from shared.step_sums import BLOCK_ROWS, drawn_lengths, variance

from flowtrain.config.data import Shuffle
from flowtrain.costs.flops import IntArray
from flowtrain.data.lengths_file import LengthsFile
from flowtrain.data.sampler import Sampler

BATCHES = (32, 64, 256)
MIXED = 64
"""Mixed blocks, the default of data.shuffle_blocks; the targets hold for it."""
NUM_BLOCKS = 1000
DRAWS_PER_SEED = 1_000_000
NUM_TIMED, STEP = 400, 256
"""The time of a draw is taken over so many steps of so many samples."""
MOST = 1.1


def quality(name: str, lengths: IntArray, num_seeds: int) -> Iterator[Figure]:
    """Yield the spread of a step's token sum over that of ``rows``, for unsorted and for sorted rows."""
    num_epochs = -(-DRAWS_PER_SEED // len(lengths))
    by_row = _runs(lengths, "rows", 1, num_seeds, num_epochs)
    unsorted = _runs(lengths, "blocks", MIXED, num_seeds, num_epochs)
    for batch in BATCHES:
        figure = f"{name}.unsorted.mixed_{MIXED}.batch_{batch}"
        yield at_most(figure, _ratio(unsorted, by_row, batch), "1", MOST, _range(unsorted, by_row, batch))
    num_blocks = -(-len(lengths) // BLOCK_ROWS)  # the target is for blocks that are many times those mixed
    for mixed in (16, MIXED, 256):
        in_order = _runs(np.sort(lengths), "blocks", mixed, num_seeds, num_epochs)
        for batch in BATCHES:
            figure, ratio = f"{name}.sorted.mixed_{mixed}.batch_{batch}", _ratio(in_order, by_row, batch)
            expected = math.sqrt(1 + batch / mixed)
            note = f"{num_blocks} blocks, theory {expected:.3f}; {_range(in_order, by_row, batch)}"
            if mixed == MIXED and num_blocks >= NUM_BLOCKS:
                yield at_most(figure, ratio, "1", round(MOST * expected, 4), note)
            else:
                yield Figure(figure, ratio, "1", note=note)


def speed() -> Iterator[Figure]:
    """Yield the time of a draw."""
    first_rows = np.arange(0, NUM_BLOCKS * BLOCK_ROWS + 1, BLOCK_ROWS)
    shuffles: tuple[Shuffle, ...] = ("blocks", "rows", "none")
    for shuffle in shuffles:
        taken = []
        for _ in range(5):
            sampler = Sampler([first_rows], [1.0], 0, shuffle, MIXED)
            started = time.process_time()
            for _ in range(NUM_TIMED):
                sampler.take(STEP)
            taken.append((time.process_time() - started) / (NUM_TIMED * STEP) * 1e6)
        note = f"CPU time, median of 5; {min(taken):.2f} to {max(taken):.2f}"
        yield Figure(f"draw.{shuffle}", float(np.median(taken)), "us", note=note)


def _runs(lengths: IntArray, shuffle: Shuffle, mixed: int, num_seeds: int, num_epochs: int) -> list[IntArray]:
    return [drawn_lengths(lengths, shuffle, mixed, seed, num_epochs) for seed in range(num_seeds)]


def _ratio(runs: list[IntArray], by_row: list[IntArray], batch: int) -> float:
    return math.sqrt(variance(runs, batch) / variance(by_row, batch))


def _range(runs: list[IntArray], by_row: list[IntArray], batch: int) -> str:
    ratios = [_ratio([run], [rows], batch) for run, rows in zip(runs, by_row, strict=True)]
    return f"{len(runs)} seeds: {min(ratios):.3f} to {max(ratios):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, nargs="+", action="extend", default=[], metavar="CSV")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    drawn = LOG_NORMAL.text.draw(np.random.default_rng(0), NUM_BLOCKS * BLOCK_ROWS)
    figures = list(quality("log_normal", drawn, args.seeds))
    for path in args.trace:
        figures += quality(path.stem, LengthsFile.read(path).lengths.tokens, args.seeds)
    emit("shuffle", [*figures, *speed()], args.json)


if __name__ == "__main__":
    main()
