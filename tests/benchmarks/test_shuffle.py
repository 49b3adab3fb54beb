"""Mixing blocks keeps the token sums of steps even; orders depend on seeds alone, so the figures are exact."""

from __future__ import annotations

import math

import numpy as np
import pytest
from shared.step_sums import BLOCK_ROWS, drawn_lengths, variance

from flowtrain.costs.flops import IntArray

NUM_BLOCKS, MIXED = 1000, 64
NUM_EPOCHS = 8
BATCHES = (32, 64, 256)


@pytest.fixture(scope="module")
def lengths() -> IntArray:
    drawn = np.random.default_rng(0).lognormal(math.log(400), 1.0, NUM_BLOCKS * BLOCK_ROWS)
    return np.rint(drawn).astype(np.int64)


@pytest.fixture(scope="module")
def by_row(lengths: IntArray) -> IntArray:
    return drawn_lengths(lengths, "rows", 1, 0, NUM_EPOCHS // 2)


def test_unsorted_rows_are_as_even_as_by_a_full_shuffle(lengths: IntArray, by_row: IntArray) -> None:
    mixed = drawn_lengths(lengths, "blocks", MIXED, 0, NUM_EPOCHS)
    for batch in BATCHES:
        assert 1 / 1.1 < math.sqrt(variance([mixed], batch) / variance([by_row], batch)) <= 1.1


def test_rows_sorted_by_length_are_as_even_as_so_many_blocks_can_be(lengths: IntArray, by_row: IntArray) -> None:
    """A step of b samples draws from 64 nearly equal lengths: its variance is b + b * b / 64 rows' instead of b."""
    mixed = drawn_lengths(np.sort(lengths), "blocks", MIXED, 0, NUM_EPOCHS)
    for batch in BATCHES:
        ratio, expected = math.sqrt(variance([mixed], batch) / variance([by_row], batch)), math.sqrt(1 + batch / MIXED)
        assert 0.85 * expected < ratio <= 1.1 * expected
