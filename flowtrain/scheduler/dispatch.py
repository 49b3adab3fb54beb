"""Dispatch: which DP rank runs which microbatch, and which run side by side.

Every method deals microbatches in descending order of cost, bucket by bucket, one slot at a time. So the members of a
slot are neighbours in cost, whatever the method, and every rank gets the same number: starting afresh in each bucket
would not, which collectives inside forward and backward do not survive. Where costs are alike, neighbours in the vision
encoder's work share a slot. So the sum of the slots' dearest members is the smallest that any choice of slots has, but
for ``ALIKE`` a slot. The methods differ in which rank gets which member.
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
"""Share of its total that a swap must save the dearer rank to be worth making."""


class Dispatcher(Protocol):
    """A pure, deterministic way to hand microbatches to DP ranks, the same number to each."""

    def __call__(self, costs: FloatArray, vision: IntArray, buckets: IntArray, dp_size: int) -> IntArray:
        """Return the slots, int64 ``[num_slots, dp_size]`` of indices of microbatches.

        costs, vision, buckets: of each microbatch, their number a multiple of ``dp_size``.
        """
        ...


def zigzag(costs: FloatArray, vision: IntArray, buckets: IntArray, dp_size: int) -> IntArray:
    """Deal to ranks 0..dp-1, then dp-1..0, and so on (FlowTrain Algorithm 1, lines 15-27).

    A pass that a bucket leaves unfinished is finished by the next one, with its direction.
    """
    slots = round_robin(costs, vision, buckets, dp_size)
    slots[1::2] = slots[1::2, ::-1].copy()
    return slots


def round_robin(costs: FloatArray, vision: IntArray, buckets: IntArray, dp_size: int) -> IntArray:
    """Deal to ranks 0..dp-1, again and again: the first ranks get the dearest of every slot."""
    assert len(costs) == len(buckets) and len(costs) % dp_size == 0, (len(costs), len(buckets), dp_size)
    alike = np.rint(costs / (ALIKE * costs.mean())) if costs.any() else costs
    order = np.lexsort((-costs, -vision, -alike, buckets))  # the last key counts most; ties: the lower index first
    return order.reshape(-1, dp_size)


def lpt(costs: FloatArray, vision: IntArray, buckets: IntArray, dp_size: int) -> IntArray:
    """Deal the dearest of each slot to the rank that has the least so far (longest processing time first).

    Then the dearest rank swaps with another inside a slot for as long as that makes the dearer of the two cheaper.
    """
    slots = round_robin(costs, vision, buckets, dp_size)
    _level(slots, costs[slots])
    return slots


@compiled
def _level(slots: IntArray, costs: FloatArray) -> None:
    """Reorder the members of each slot in place; costs: theirs, ``[num_slots, dp_size]``."""
    num_slots, dp_size = slots.shape
    totals = np.zeros(dp_size)
    for slot in range(num_slots):
        # Kinds of sort differ between versions of the library; a stable one gives the same ranks everywhere.
        lightest_first = np.argsort(totals, kind="mergesort")
        dearest_first = np.argsort(-costs[slot], kind="mergesort")
        members, member_costs = slots[slot][dearest_first], costs[slot][dearest_first]
        for place in range(dp_size):
            rank = lightest_first[place]
            slots[slot, rank], costs[slot, rank] = members[place], member_costs[place]
        totals += costs[slot]
    for _ in range(MAX_SWAPS_PER_RANK * dp_size):
        dearest = totals.argmax()
        best, best_slot, best_rank = totals[dearest] * (1.0 - EVEN), -1, -1
        for slot in range(num_slots):
            for rank in range(dp_size):
                moved = costs[slot, dearest] - costs[slot, rank]
                dearer = max(totals[dearest] - moved, totals[rank] + moved)
                if dearer < best:
                    best, best_slot, best_rank = dearer, slot, rank
        if best_slot < 0:
            break
        moved = costs[best_slot, dearest] - costs[best_slot, best_rank]
        totals[dearest] -= moved
        totals[best_rank] += moved
        pair = slots[best_slot, dearest], slots[best_slot, best_rank]
        slots[best_slot, best_rank], slots[best_slot, dearest] = pair
        costs[best_slot, dearest] -= moved
        costs[best_slot, best_rank] += moved


DISPATCHERS: dict[str, Dispatcher] = {"lpt": lpt, "zigzag": zigzag, "round_robin": round_robin}


def get_dispatcher(name: str) -> Dispatcher:
    """Return the dispatch method called ``name``; ConfigError names the known ones."""
    if name not in DISPATCHERS:
        raise ConfigError(f"scheduler.dispatch ({name!r}) is unknown; choose one of {', '.join(sorted(DISPATCHERS))}")
    return DISPATCHERS[name]
