"""Dispatch: which DP rank runs which microbatch, and which microbatches run side by side.

Every method deals microbatches in descending order of cost, bucket by bucket, one slot at a time. So in every method
the members of a slot are neighbours in cost, and every rank gets the same number of microbatches. Collectives inside
forward and backward need equal numbers; a new start in each bucket would make them differ. Microbatches of similar cost
are ordered by the vision encoder's work, so that neighbours in that share a slot. The sum of the slots' costliest
members is the smallest possible, within ``ALIKE`` per slot. The methods differ in which rank gets which member.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from flowtrain.costs.flops import FloatArray, IntArray
from flowtrain.errors import ConfigError
from flowtrain.scheduler.buckets import ALIKE
from flowtrain.scheduler.compiled import compiled

MAX_SWAPS_PER_RANK = 4
EVEN = 1e-5
"""A swap must save the costlier rank at least this share of its total."""


class Dispatcher(Protocol):
    """A pure, deterministic way to hand microbatches to DP ranks, the same number to each."""

    def __call__(self, costs: FloatArray, vision: IntArray, buckets: IntArray, dp_size: int) -> IntArray:
        """Return the slots, int64 ``[num_slots, dp_size]`` of indices of microbatches.

        costs, vision, buckets: one value per microbatch; the number of microbatches is a multiple of ``dp_size``.
        """
        ...


def zigzag(costs: FloatArray, vision: IntArray, buckets: IntArray, dp_size: int) -> IntArray:
    """Deal to ranks 0..dp-1, then dp-1..0, and so on (FlowTrain Algorithm 1, lines 15-27).

    If a bucket ends within a pass, the next bucket finishes the pass in the same direction.
    """
    slots = round_robin(costs, vision, buckets, dp_size)
    slots[1::2] = slots[1::2, ::-1].copy()
    return slots


def round_robin(costs: FloatArray, vision: IntArray, buckets: IntArray, dp_size: int) -> IntArray:
    """Deal to ranks 0..dp-1, again and again: rank 0 gets the costliest of every slot."""
    assert len(costs) == len(buckets) and len(costs) % dp_size == 0, (len(costs), len(buckets), dp_size)
    alike = np.rint(costs / (ALIKE * costs.mean())) if costs.any() else costs
    order = np.lexsort((-costs, -vision, -alike, buckets))  # the last key is the primary one; ties: lower index first
    return order.reshape(-1, dp_size)


def lpt(costs: FloatArray, vision: IntArray, buckets: IntArray, dp_size: int) -> IntArray:
    """Deal the costliest of each slot to the rank with the lowest total so far (longest processing time first).

    Then the costliest rank swaps with another rank inside a slot, as long as this lowers the higher of their totals.
    """
    slots = round_robin(costs, vision, buckets, dp_size)
    _level(slots, costs[slots])
    return slots


@compiled
def _level(slots: IntArray, costs: FloatArray) -> None:
    """Reorder the members of each slot in place; costs: of the members, ``[num_slots, dp_size]``."""
    num_slots, dp_size = slots.shape
    totals = np.zeros(dp_size)
    for slot in range(num_slots):
        # The default sort differs between versions of the library; a stable sort gives the same ranks everywhere.
        lightest_first = np.argsort(totals, kind="mergesort")
        costliest_first = np.argsort(-costs[slot], kind="mergesort")
        members, member_costs = slots[slot][costliest_first], costs[slot][costliest_first]
        for place in range(dp_size):
            rank = lightest_first[place]
            slots[slot, rank], costs[slot, rank] = members[place], member_costs[place]
        totals += costs[slot]
    for _ in range(MAX_SWAPS_PER_RANK * dp_size):
        costliest = totals.argmax()
        best, best_slot, best_rank = totals[costliest] * (1.0 - EVEN), -1, -1
        for slot in range(num_slots):
            for rank in range(dp_size):
                moved = costs[slot, costliest] - costs[slot, rank]
                costlier = max(totals[costliest] - moved, totals[rank] + moved)
                if costlier < best:
                    best, best_slot, best_rank = costlier, slot, rank
        if best_slot < 0:
            break
        moved = costs[best_slot, costliest] - costs[best_slot, best_rank]
        totals[costliest] -= moved
        totals[best_rank] += moved
        pair = slots[best_slot, costliest], slots[best_slot, best_rank]
        slots[best_slot, best_rank], slots[best_slot, costliest] = pair
        costs[best_slot, costliest] -= moved
        costs[best_slot, best_rank] += moved


DISPATCHERS: dict[str, Dispatcher] = {"lpt": lpt, "zigzag": zigzag, "round_robin": round_robin}


def get_dispatcher(name: str) -> Dispatcher:
    """Return the dispatch method called ``name``; ConfigError names the known ones."""
    if name not in DISPATCHERS:
        raise ConfigError(f"scheduler.dispatch ({name!r}) is unknown; choose one of {', '.join(sorted(DISPATCHERS))}")
    return DISPATCHERS[name]
