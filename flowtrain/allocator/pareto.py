"""Reduction to configurations worth choosing: no other one is as fast with fewer devices or faster with as many."""

from __future__ import annotations

import numpy as np

from flowtrain.costs.flops import FloatArray, IntArray

SAME_RATE = 1e-9
"""Rates whose relative difference is smaller than this count as equal: they differ by rounding."""


def pareto_front(devices: IntArray, rates: FloatArray, *tie_breaks: IntArray) -> IntArray:
    """Return indices of the front of (devices, rate), devices and rates ascending; int64 ``[F]``.

    devices, rates: ``[C]``. Of configurations with equal devices and rate, the one with the smallest ``tie_breaks``, in
    the given order, stays; then the one with the lowest index. Without this reduction, Eq. 2 (FlowTrain 3.3) would
    choose slow configurations on purpose to balance the flow.
    """
    order = np.lexsort((*reversed(tie_breaks), -_rounded(rates), devices))
    sorted_rates = rates[order]
    best_before = np.concatenate([[0.0], np.maximum.accumulate(sorted_rates)[:-1]])
    return order[sorted_rates > best_before * (1.0 + SAME_RATE)].astype(np.int64)


def _rounded(rates: FloatArray) -> FloatArray:
    """Rates rounded to nine digits, so that equal rates compare as equal."""
    positive = np.where(rates > 0.0, rates, 1.0)
    scales = 10.0 ** np.floor(np.log10(positive))
    return np.round(rates / scales, 9) * scales
