"""Best-fit packing of samples in the given order: the paper's method."""

from __future__ import annotations

import numpy as np

from flowtrain.scheduler.packing.base import Bins, Lengths, PackingRules
from flowtrain.scheduler.packing.segment_tree import best_fit_numbers


def best_fit(lengths: Lengths, rules: PackingRules) -> Bins:
    """Put each sample, in the order given, into the open bin that it fills most tightly (FlowTrain Algorithm 1, 1-11).

    Of equally tight bins, the one that reached this state last is taken. So late samples go into bins of late samples,
    and the other bins are complete, and can run, early. O(n log capacity).
    """
    return Bins.by_number(*best_fit_numbers(lengths.tokens, np.arange(len(lengths)), rules.capacity))
