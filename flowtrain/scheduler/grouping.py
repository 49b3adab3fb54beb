"""Groups of samples over more than a step: OmniBal's (4.1), and the two samplings it is compared with (Table 3).

A group is what one rank trains at a time. Groups follow each other in slots: the groups of all ranks at one time.
"""

from __future__ import annotations

import numpy as np

from flowtrain.costs.flops import IntArray
from flowtrain.scheduler.packing.base import Bins, Lengths
from flowtrain.scheduler.packing.isf import ITERATIONS, draw_groups, isf_quotas
from flowtrain.scheduler.packing.segment_tree import best_fit_numbers


def isf_groups(
    lengths: Lengths, capacity: int, seed: int, iterations: int = ITERATIONS, *, vision_quota: int | None = None
) -> Bins:
    """Return groups by iterative sampling and filtering, then best fit for what is left; in random order.

    capacity: the most tokens of a group (Q_t). vision_quota: the most vision work of a full group (Q_v); None: it
    follows from the samples (OmniBal 5.2).
    """
    quotas = isf_quotas(lengths, capacity) if vision_quota is None else (vision_quota, capacity)
    number, count = draw_groups(lengths, *quotas, seed, iterations)
    left = np.flatnonzero(number < 0)
    number_left, count_left = best_fit_numbers(lengths.tokens[left], np.arange(len(left)), capacity)
    number[left] = count + number_left
    return _shuffled(Bins.by_number(number, count + count_left), seed)


def length_groups(lengths: Lengths, size: int, seed: int) -> Bins:
    """Return groups of ``size`` samples of similar length, in random order: little padding inside a group."""
    order = np.lexsort((lengths.vision, lengths.tokens))
    return _shuffled(_cut(order, size), seed)


def device_groups(lengths: Lengths, size: int, ranks: int, seed: int) -> Bins:
    """Return groups of ``size`` samples such that the groups of a slot are alike: ranks wait little for each other.

    Runs of ``ranks`` samples of similar length are dealt one to each rank; a group has samples of ``size`` runs that
    have nothing else in common. Samples that fill no slot are left out.
    """
    rng = np.random.default_rng(seed)
    num_slots = len(lengths) // (size * ranks)
    order = np.lexsort((lengths.vision, lengths.tokens))
    kept = np.sort(rng.permutation(len(order))[: num_slots * size * ranks])
    runs = rng.permutation(order[kept].reshape(-1, ranks))
    slots = runs.reshape(num_slots, size, ranks).transpose(0, 2, 1)  # [slot, rank, sample]
    return _cut(slots.reshape(-1), size)


def _cut(order: IntArray, size: int) -> Bins:
    """Groups of ``size`` neighbours; the last one may be smaller."""
    ends = np.minimum(np.arange(0, len(order) + size, size), len(order))
    return Bins(order.astype(np.int64), np.unique(ends).astype(np.int64) if len(order) else np.zeros(1, np.int64))


def _shuffled(groups: Bins, seed: int) -> Bins:
    """The same groups in random order."""
    order = np.random.default_rng((seed, 1)).permutation(len(groups))
    counts = np.diff(groups.offsets)[order]
    starts = np.repeat(groups.offsets[:-1][order], counts)
    ends = np.cumsum(counts)
    inside = np.arange(len(groups.members)) - np.repeat(ends - counts, counts)
    return Bins(groups.members[starts + inside], np.concatenate([[0], ends]).astype(np.int64))
