"""Which faults the runs of a campaign get: drawn from the seed and the number of the run alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

ROLES = ("encoder", "feeder", "backbone", "coordinator", "keeper", "raylet", "driver")
KINDS = ("kill", "stop")
PHASES = ("start", "step", "evaluation", "checkpoint", "recovery")
MAX_FAULTS = 3
"""Of one run."""


@dataclass(frozen=True)
class Planned:
    """A fault. after_steps: it comes when the run has done so many. delay_s: after that.

    phase: start: before the first step. step: at any moment. evaluation: in the step before one, or in it. checkpoint:
    as soon as one is being written. recovery: as soon as the run says that it recovers from the fault before.
    """

    role: str
    kind: str
    phase: str
    after_steps: int
    delay_s: float


def planned_faults(seed: int, run: int, roles: Sequence[str], num_steps: int, every_evaluation: int) -> list[Planned]:
    """The faults of a run, in their order.

    Role and kind come from a shuffled deck that has each pair once, so that none is missing in a short campaign.
    num_steps, every_evaluation: of the run.
    """
    deck = [(role, kind) for role in roles for kind in KINDS if (role, kind) != ("driver", "stop")]
    first = sum(_count(seed, each) for each in range(run))  # a stopped driver waits for whoever stopped it
    rng = random.Random(f"{seed}/{run}")
    faults = []
    for number in range(first, first + _count(seed, run)):
        round_, place = divmod(number, len(deck))
        shuffled = random.Random(f"{seed}/deck/{round_}").sample(deck, len(deck))
        phase = rng.choice(PHASES)
        after = {"start": 0, "evaluation": every_evaluation * rng.randint(1, num_steps // every_evaluation - 1) - 1}
        steps = after.get(phase, rng.randint(1, num_steps - 3))
        delay_s = rng.uniform(0.0, 1.0) if phase in ("step", "evaluation", "start") else 0.0
        faults.append(Planned(*shuffled[place], phase, steps, delay_s))
    faults.sort(key=lambda fault: (fault.phase != "start", fault.after_steps))
    return faults


def _count(seed: int, run: int) -> int:
    return random.Random(f"{seed}/count/{run}").randint(1, MAX_FAULTS)
