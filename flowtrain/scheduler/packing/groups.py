"""Packing that keeps the groups in which ``data.grouping`` has ordered the samples."""

from __future__ import annotations

import numpy as np

from flowtrain.costs.flops import IntArray
from flowtrain.scheduler.compiled import compiled
from flowtrain.scheduler.packing.base import Bins, Lengths, PackingRules


def groups(lengths: Lengths, rules: PackingRules) -> Bins:
    """Fill a bin in the order given until the next sample exceeds the capacity or the vision quota.

    A group begins with its longest sample (``data.grouped_rows``), so the end of one is seldom filled with the begin of
    the next. A step cuts the groups at its ends.
    """
    quota = np.iinfo(np.int64).max if rules.vision_quota is None else rules.vision_quota
    return Bins.by_number(*_next_fit(lengths.tokens, lengths.vision, rules.capacity, quota))


@compiled
def _next_fit(tokens: IntArray, vision: IntArray, capacity: int, quota: int) -> tuple[IntArray, int]:
    """Return each sample's bin, int64 ``[num_samples]``, and the number of bins."""
    number = np.empty(len(tokens), dtype=np.int64)
    bin_number, sum_tokens, sum_vision = -1, capacity + 1, 0
    for index in range(len(tokens)):
        assert 1 <= tokens[index] <= capacity
        if sum_tokens + tokens[index] > capacity or sum_vision + vision[index] > quota:
            bin_number += 1
            sum_tokens, sum_vision = 0, 0
        sum_tokens += tokens[index]
        sum_vision += vision[index]
        number[index] = bin_number
    return number, bin_number + 1
