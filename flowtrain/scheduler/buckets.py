"""Buckets: microbatches of similar cost, which a pipeline runs one after another at a steady pace."""

from __future__ import annotations

import numpy as np

from flowtrain.costs.flops import FloatArray, IntArray

ALIKE = 1e-3
"""Microbatches whose costs differ by less than this share of the mean cost count as alike."""


def bucket_of(costs: FloatArray, num_buckets: int) -> IntArray:
    """Return each microbatch's bucket; bucket 0 has the highest costs (FlowTrain Algorithm 1, lines 12-14).

    The range of the costs is cut into ``num_buckets`` equal intervals, so two members of a bucket differ by at most
    ``(max - min) / num_buckets``; some intervals may stay empty. The width is at least ``ALIKE`` of the mean cost.
    """
    assert num_buckets >= 1, num_buckets
    if not len(costs):
        return np.zeros(0, dtype=np.int64)
    costliest = costs.max()
    width = max((costliest - costs.min()) / num_buckets, ALIKE * costs.mean())
    if width == 0.0:
        return np.zeros(len(costs), dtype=np.int64)
    return np.minimum(((costliest - costs) / width).astype(np.int64), num_buckets - 1)
