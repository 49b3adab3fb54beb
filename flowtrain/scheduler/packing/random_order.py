"""Packing as in plain data loaders that shuffle: the baseline that balance is measured against."""

from __future__ import annotations

import numpy as np

from flowtrain.scheduler.packing.base import Bins, Lengths, PackingRules
from flowtrain.scheduler.packing.sequential import next_fit_numbers


def random_order(lengths: Lengths, rules: PackingRules) -> Bins:
    """Shuffle the samples by ``rules.seed``, then fill one bin after another, as ``sequential`` does."""
    order = np.random.default_rng(rules.seed).permutation(len(lengths))
    return Bins.by_number(*next_fit_numbers(lengths.tokens, order, rules.capacity))
