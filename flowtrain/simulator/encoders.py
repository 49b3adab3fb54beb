"""When encoders of their own have the images of a step's microbatches ready (FlowTrain 3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapreplace

import numpy as np

from flowtrain.costs.flops import FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class EncodedStep:
    """One encoder's work for a step, in batches that its replicas lease in this order."""

    seconds: tuple[float, ...]
    """Of each encode batch."""
    needed: IntArray
    """Encode batches that each slot and those before it need, ``[K]``."""

    def ready_s(self, free: list[float], opened: float) -> FloatArray:
        """Return when the images of each slot are encoded, ``[K]``.

        free: when each replica has nothing to do, a heap that is changed. opened: when the step may be encoded.
        """
        done, latest = [0.0], 0.0
        for seconds in self.seconds:
            first = free[0]
            finish = (first if first > opened else opened) + seconds
            heapreplace(free, finish)
            if finish > latest:
                latest = finish
            done.append(latest)
        return np.array(done)[self.needed]

    def fullest_s(self, replicas: int) -> float:
        """Return the seconds of the replica that gets most of the step, if each leases a batch whenever it is free."""
        free = [0.0] * replicas
        self.ready_s(free, 0.0)
        return max(free)


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
