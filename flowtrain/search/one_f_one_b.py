"""Times of 1F1B for many orders of microbatches: PipeTune's graph of microbatches and stages (its 4, A.5), compiled.

It ranks candidates. The simulator, which knows collectives, replicas and links, then decides among the best few.
"""

from __future__ import annotations

import numpy as np

from flowtrain.costs.flops import FloatArray, IntArray
from flowtrain.scheduler.compiled import compiled

NOTHING_EARLY = -1.0
"""In place of room: no images are encoded ahead."""
IN_TIME = -1
"""In place of an operation: a microbatch's images are encoded right before its forward."""


@compiled
def step_s(
    order: IntArray,
    forward: FloatArray,
    backward: FloatArray,
    encode: FloatArray,
    moved: FloatArray,
    held: FloatArray,
    room: float,
    stretch: float,
    early: IntArray,
) -> float:
    """Return the seconds of a step whose k-th microbatch is ``order[k]``.

    forward, backward: on each rank, ``[pp, K]``. encode: of the first rank before a forward; moved: from rank to rank;
    held: bytes of a microbatch whose images are encoded ahead; each ``[K]``. room: bytes for these, or
    ``NOTHING_EARLY``.

    While the first rank waits for a gradient it encodes the images of later microbatches, in their order, as long as
    the room allows and none takes more than ``stretch`` times what is left of the gap. early: becomes, for each k, the
    number of the rank's forwards and backwards before which it encodes, or ``IN_TIME``.
    """
    pp, count = forward.shape
    forward_end, backward_end = np.full((pp, count), -1.0), np.full((pp, count), -1.0)
    clock, at = np.zeros(pp), np.zeros(pp, dtype=np.int64)
    early[:] = -1
    encoded, holds, left = 0, 0.0, 2 * pp * count
    while left > 0:
        for rank in range(pp):
            warmup = min(pp - 1 - rank, count)
            while at[rank] < 2 * count:
                number = at[rank]
                steady = number - warmup
                is_backward, position = False, number
                if steady >= 2 * (count - warmup):
                    is_backward, position = True, number - count
                elif steady >= 0:
                    is_backward, position = steady % 2 == 1, steady // 2
                    if not is_backward:
                        position += warmup
                which, now, ready = order[position], clock[rank], 0.0
                if is_backward and rank + 1 < pp:
                    ready = backward_end[rank + 1, position]
                elif not is_backward and rank > 0:
                    ready = forward_end[rank - 1, position]
                if ready < 0.0:
                    break
                if ready > 0.0:
                    ready += moved[which]
                if rank == 0 and not is_backward:
                    if encoded <= position:
                        now += encode[which]
                        encoded = position + 1
                    else:
                        holds -= held[which]
                elif rank == 0 and room >= 0.0:
                    while encoded < count and ready > now:
                        following = order[encoded]
                        if encode[following] > stretch * (ready - now) or holds + held[following] > room:
                            break
                        early[encoded] = number
                        now += encode[following]
                        holds += held[following]
                        encoded += 1
                now = max(now, ready)
                if is_backward:
                    now += backward[rank, which]
                    backward_end[rank, position] = now
                else:
                    now += forward[rank, which]
                    forward_end[rank, position] = now
                clock[rank] = now
                at[rank] += 1
                left -= 1
    return clock.max()


@compiled
def best_of(
    orders: IntArray,
    forward: FloatArray,
    backward: FloatArray,
    encode: FloatArray,
    moved: FloatArray,
    held: FloatArray,
    room: float,
) -> tuple[int, float]:
    """Return the first of the orders ``[O, K]`` that is fastest, and its seconds; other arguments as of ``step_s``."""
    early = np.empty(orders.shape[1], dtype=np.int64)
    best, best_s = 0, np.inf
    for index in range(len(orders)):
        seconds = step_s(orders[index], forward, backward, encode, moved, held, room, 1.0, early)
        if seconds < best_s:
            best, best_s = index, seconds
    return best, best_s


@compiled
def improve(
    order: IntArray,
    places: IntArray,
    forward: FloatArray,
    backward: FloatArray,
    encode: FloatArray,
    moved: FloatArray,
    held: FloatArray,
    room: float,
) -> float:
    """Change an order in place as long as that makes it faster; returns its seconds.

    places: pairs of places, ``[T, 2]``: the microbatches of a pair are exchanged, and in every second try the first one
    moves to the place of the other.
    """
    early = np.empty(len(order), dtype=np.int64)
    best_s = step_s(order, forward, backward, encode, moved, held, room, 1.0, early)
    trial = order.copy()
    for attempt in range(len(places)):
        one, other = places[attempt]
        if one == other:
            continue
        if attempt % 2 == 0:
            trial[one], trial[other] = order[other], order[one]
        else:
            step = 1 if other > one else -1
            for place in range(one, other, step):
                trial[place] = order[place + step]
            trial[other] = order[one]
        seconds = step_s(trial, forward, backward, encode, moved, held, room, 1.0, early)
        if seconds < best_s * (1.0 - 1e-9):
            best_s = seconds
            order[:] = trial
        else:
            trial[:] = order
    return best_s
