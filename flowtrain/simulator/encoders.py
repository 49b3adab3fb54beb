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
