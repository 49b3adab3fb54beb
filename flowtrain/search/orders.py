"""Candidates of a search: how many slots a step has, and in which orders these may run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import numpy as np

from flowtrain.costs.flops import FloatArray, IntArray
from flowtrain.scheduler.buckets import ALIKE

MOST_CLUSTERS = 5
"""PipeTune keeps the number of clusters below six (its 5.2)."""
MOST_TRIED = 6
"""So few slots run in each of their orders, at most 720."""
_RATIO = 1.4
"""Numbers of slots grow by this ratio."""
_TIMES_FEWEST, _TIMES_RANKS = 2, 8
"""They grow up to so many times the fewest, or the pipeline's ranks: more would fill the pipeline hardly better."""


def slot_counts(num_samples: int, num_tokens: int, capacity: int, dp_size: int, pp_size: int) -> list[int]:
    """Return numbers of slots, the fewest first: microbatches of as many tokens as they hold, and of ever fewer.

    capacity: most tokens of a microbatch.
    """
    fewest = max(1, -(-num_tokens // (capacity * dp_size)))
    most = max(fewest, min(num_samples // dp_size, max(_TIMES_FEWEST * fewest, _TIMES_RANKS * pp_size)))
    counts, number = [], fewest
    while number <= most:
        counts.append(number)
        number = max(number + 1, int(number * _RATIO))
    return counts


def clusters_of(latency: FloatArray) -> list[IntArray]:
    """Return at most ``MOST_CLUSTERS`` runs of slots, the slowest first, cut where latencies differ most."""
    slowest_first = np.argsort(-latency, kind="stable")
    gaps = -np.diff(latency[slowest_first])
    wide = np.flatnonzero(gaps > ALIKE * latency.mean())
    widest = wide[np.argsort(-gaps[wide], kind="stable")][: MOST_CLUSTERS - 1]
    return np.split(slowest_first, np.sort(widest) + 1)


def cluster_orders(latency: FloatArray) -> IntArray:
    """Return all orders of the clusters, or of few slots, ``[O, K]``; the first runs slots in their own order."""
    if len(latency) <= MOST_TRIED:
        return np.array(list(permutations(range(len(latency)))))
    orders = [np.concatenate(clusters) for clusters in permutations(clusters_of(latency))]
    return np.stack([np.arange(len(latency)), *orders])


def neighbour_places(num_slots: int, count: int) -> IntArray:
    """Return ``count`` pairs of places, always the same ones; int64 ``[count, 2]``."""
    return np.random.default_rng(0).integers(0, num_slots, (count, 2))


def starting_orders(order: IntArray, count: int) -> Iterator[IntArray]:
    """Yield a copy of an order, then random ones, always the same; ``count`` in all."""
    yield order.copy()
    rng = np.random.default_rng(0)
    for _ in range(count - 1):
        yield rng.permutation(order)
