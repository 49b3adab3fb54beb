"""When encoders of their own have the images of a step's microbatches ready (FlowTrain 3.2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flowtrain.costs.flops import FloatArray, IntArray
from flowtrain.scheduler.compiled import compiled


@dataclass(frozen=True, slots=True, eq=False)
class EncodedStep:
    """One encoder's work for a step, in batches that its replicas lease in this order."""

    seconds: FloatArray
    """Of each encode batch, ``[E]``."""
    needed: IntArray
    """Encode batches that each slot and those before it need, ``[K]``."""

    def ready_s(self, free: FloatArray, opened: float) -> FloatArray:
        """Return when the images of each slot are encoded, ``[K]``.

        free: when each replica has nothing to do, a heap that is changed. opened: when the step may be encoded.
        """
        done = np.zeros(len(self.seconds) + 1)
        _lease(self.seconds, free, opened, done)
        return done[self.needed]

    def fullest_s(self, replicas: int) -> float:
        """Return the seconds of the replica that gets most of the step, if each leases a batch whenever it is free."""
        free = np.zeros(replicas)
        self.ready_s(free, 0.0)
        return float(free.max())


@compiled
def _lease(seconds: FloatArray, free: FloatArray, opened: float, done: FloatArray) -> None:
    """Give each batch to the replica that is free first; done: when all up to each are encoded, from ``done[0]`` on."""
    count = len(free)
    for number in range(len(seconds)):
        finish = max(free[0], opened) + seconds[number]
        at, child = 0, 1
        while child < count:  # the root of the heap gets a later time, and sinks
            if child + 1 < count and free[child + 1] < free[child]:
                child += 1
            if free[child] >= finish:
                break
            free[at] = free[child]
            at, child = child, 2 * child + 1
        free[at] = finish
        done[number + 1] = max(done[number], finish)


def shared_end_s(ends: FloatArray, works: FloatArray, encodes: FloatArray, index: int, lookahead: int) -> float:
    """Return when a device can have done all work up to a step, of which none is done before it may be.

    From any earlier step i on: what is encoded for it and later, and the backbone's work since its window opened.
    """
    first = np.arange(index + 1)
    opens = first - lookahead - 1
    opened = np.where(opens >= 0, ends[opens], 0.0)
    work = np.concatenate([[0.0], np.cumsum(works[: index + 1])])
    encode = np.concatenate([[0.0], np.cumsum(encodes[: index + 1])])
    since = work[-1] - work[np.maximum(opens + 1, 0)]
    return float((opened + since + encode[-1] - encode[first]).max())
