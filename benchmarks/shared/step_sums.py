"""Token sums of steps by the order in which a run draws its samples."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from flowtrain.config.data import Shuffle
from flowtrain.costs.flops import IntArray
from flowtrain.data.sampler import Sampler

BLOCK_ROWS = 100
"""Rows of a block: the hub's parquet files have row groups of so many."""


def drawn_lengths(
    lengths: IntArray, shuffle: Shuffle, shuffle_blocks: int, seed: int, num_epochs: int, block_rows: int = BLOCK_ROWS
) -> IntArray:
    """Return the lengths of a source's rows in the order in which a run draws them, epoch after epoch."""
    first_rows = np.append(np.arange(0, len(lengths), block_rows), len(lengths))
    sampler = Sampler([first_rows], [1.0], seed, shuffle, shuffle_blocks)
    epochs = ([draw.ref.row for draw in sampler.take(len(lengths))] for _ in range(num_epochs))
    return np.concatenate([lengths[rows] for rows in epochs])


def variance(drawn: Iterable[IntArray], batch: int) -> float:
    """Return the variance of a step's token sum, the mean over several runs with steps of ``batch`` samples."""
    return float(np.mean([_sums(each, batch).var(ddof=1) for each in drawn]))


def _sums(drawn: IntArray, batch: int) -> IntArray:
    sums: IntArray = drawn[: len(drawn) // batch * batch].reshape(-1, batch).sum(axis=1)
    return sums
