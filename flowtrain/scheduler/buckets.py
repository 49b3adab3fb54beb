"""Buckets: microbatches of similar cost, which a pipeline runs one after another at a steady pace."""

from __future__ import annotations

from collections.abc import Sequence


def bucket_of(costs: Sequence[float], num_buckets: int) -> tuple[int, ...]:
    """Return each microbatch's bucket, 0 being the dearest (FlowTrain Algorithm 1, lines 12-14).

    The range of the costs is cut into ``num_buckets`` equal intervals, so two members of a bucket differ by at most
    ``(max - min) / num_buckets``; some intervals may stay empty.
    """
    assert num_buckets >= 1, num_buckets
    if not costs:
        return ()
    dearest = max(costs)
    width = (dearest - min(costs)) / num_buckets
    if width == 0.0:
        return (0,) * len(costs)
    return tuple(min(int((dearest - cost) / width), num_buckets - 1) for cost in costs)
