"""Encoders and backbone over a sequence of drawn steps: when each step ends (FlowTrain 3.2, 3.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flowtrain.costs.flops import FloatArray
from flowtrain.simulator.encoders import EncodedStep, shared_end_s
from flowtrain.simulator.pace import Pace


@dataclass(frozen=True, slots=True, eq=False)
class DrawnStep:
    """One step."""

    slots: FloatArray
    """Seconds of each slot on the slowest replica, ``[K]``."""
    rest_s: float
    """Seconds of the step beside its slots: pipeline fill, reduction, optimizer."""
    encoded: tuple[EncodedStep, ...]
    """By encoder, as in ``replicas``."""
    shared_s: float = 0.0
    """Seconds that a device works for the step if it carries an encoder too: the backbone's part. 0: it does not."""
    shared_encode_s: float = 0.0
    """As before: what encoding adds to it on the device that encodes most of the step."""

    @property
    def backbone_s(self) -> float:
        """Seconds of the step without waiting."""
        return float(self.slots.sum()) + self.rest_s


def finishes(
    steps: Sequence[DrawnStep], replicas: Sequence[int], lookahead: int, *, is_barrier: bool, num_steps: int
) -> FloatArray:
    """Return when each of ``num_steps`` steps ends, ``[num_steps]``; ``steps`` follow each other again and again.

    A step may be encoded once the one ``lookahead + 1`` before it is done. The backbone starts a slot when its images
    are encoded, or with ``is_barrier`` when those of the whole step are. No time is ever later with a larger
    ``lookahead``, without a barrier, or with shorter work. Steps that have found their pace are not timed.
    """
    free = [np.zeros(count) for count in replicas]
    ends, last, works, encodes = np.zeros(num_steps), 0.0, np.zeros(num_steps), np.zeros(num_steps)
    started = [np.concatenate([[0.0], np.cumsum(step.slots)]) for step in steps]
    pace, devices = Pace(len(steps), lookahead), [np.zeros(1)] if any(step.shared_s for step in steps) else []
    for index in range(num_steps):
        step, before = steps[index % len(steps)], started[index % len(steps)]
        opened = float(ends[index - lookahead - 1]) if index > lookahead else 0.0
        end = last + float(before[-1])
        for encoded, heap in zip(step.encoded, free, strict=True):
            if len(encoded.seconds):
                ready = encoded.ready_s(heap, opened)
                at = ready[-1] if is_barrier else ready
                end = max(end, float((at + before[-1] - before[:-1]).max()))
        works[index], encodes[index] = step.shared_s, step.shared_encode_s
        alone = last + step.backbone_s
        last = end + step.rest_s
        for free_s in devices:
            free_s[0] = shared_end_s(ends, works, encodes, index, lookahead)
            last = max(last, float(free_s[0])) if step.shared_s else last
        ends[index] = last
        if pace.is_found(ends[: index + 1], [*free, *devices], last - alone):
            pace.go_on(ends, index + 1)
            break
    return ends
