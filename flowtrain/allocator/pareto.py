"""Reduction to configurations worth choosing: none is as fast on fewer devices, or faster on as many."""

from __future__ import annotations

import numpy as np

from flowtrain.costs.flops import FloatArray, IntArray

SAME_RATE = 1e-9
"""Rates closer than this, relatively, count as one: they differ by rounding."""


def pareto_front(devices: IntArray, rates: FloatArray, *tie_breaks: IntArray) -> IntArray:
    """Return indices of the front of (devices, rate), devices and rates ascending; int64 ``[F]``.

    devices, rates: ``[C]``. Among configurations of equal devices and rate the one with the smallest ``tie_breaks``
    stays, looked at in the order given, then the one that stands first. Without this reduction Eq. 2 (FlowTrain 3.3)
    would choose deliberately slow configurations to balance the flow.
    """
    order = np.lexsort((*reversed(tie_breaks), -_rounded(rates), devices))
    sorted_rates = rates[order]
    best_before = np.concatenate([[0.0], np.maximum.accumulate(sorted_rates)[:-1]])
    return order[sorted_rates > best_before * (1.0 + SAME_RATE)].astype(np.int64)


def _rounded(rates: FloatArray) -> FloatArray:
    """Rates to nine digits: so that ties are ties before they are broken."""
    positive = np.where(rates > 0.0, rates, 1.0)
    scales = 10.0 ** np.floor(np.log10(positive))
    return np.round(rates / scales, 9) * scales
