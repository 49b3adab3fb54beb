"""Packing as in plain data loaders: one bin at a time, in the given order."""

from __future__ import annotations

import numpy as np

from flowtrain.costs.flops import IntArray
from flowtrain.scheduler.compiled import compiled
from flowtrain.scheduler.packing.base import Bins, Lengths, PackingRules


def sequential(lengths: Lengths, rules: PackingRules) -> Bins:
    """Fill a bin with samples in the order given until the next one does not fit, then open another."""
    return Bins.by_number(*next_fit_numbers(lengths.tokens, np.arange(len(lengths)), rules.capacity))


@compiled
def next_fit_numbers(tokens: IntArray, order: IntArray, capacity: int) -> tuple[IntArray, int]:
    """Return each sample's bin, int64 ``[num_samples]``, and the number of bins, by next fit in the order given.

    tokens: int64 ``[num_samples]``, each 1 to ``capacity``. order: int64 ``[num_samples]``, a permutation.
    """
    number = np.empty(len(tokens), dtype=np.int64)
    bin_number, room = -1, 0
    for index in order:
        assert 1 <= tokens[index] <= capacity
        if tokens[index] > room:
            bin_number += 1
            room = capacity
        room -= tokens[index]
        number[index] = bin_number
    return number, bin_number + 1
