"""Measures what processes cost each other: encoder and backbone at once on a device, and two ranks of the backbone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import get_args

from ray.actor import ActorHandle

from flowtrain.controller.profiling_actors import Profilers
from flowtrain.controller.profiling_means import mean_steps
from flowtrain.costs.profile_shapes import Mix
from flowtrain.costs.profile_together import Interference, Sharded, interference_factor
from flowtrain.training.mesh import LOOPBACK
from flowtrain.types.plan import Degrees
from flowtrain.types.profile import ReplicaSteps
from flowtrain.types.samples import SampleRef

ROUNDS = 5
WINDOW_S, PIECES = 1.0, 3.0
"""A process works alone for at least so long and so many times, and with the other twice as long."""
_LEAD_S = 0.05
"""From the order to work until all begin."""


def measure_interference(
    profilers: Profilers, mix: Mix, refs: Mapping[str, Sequence[SampleRef]]
) -> dict[str, Interference]:
    """Return each encoder's interference with the backbone; both are processes with half of one device."""
    found = dict[str, Interference]()
    for name, samples in refs.items():
        with profilers.started([(0, Degrees())] * 2, on_one=True) as (backbone, encoder):
            profilers.answers([actor.start.remote(LOOPBACK, 0) for actor in (backbone, encoder)])
            (step_s,) = profilers.measured([backbone.hold_backbone.remote(mix)])
            (forward_s,) = profilers.measured([encoder.hold_encoder.remote(name, samples)])
            window_s = max(WINDOW_S, PIECES * max(step_s, forward_s))
            rounds = [_round(profilers, backbone, encoder, window_s) for _ in range(ROUNDS)]
        found[name] = Interference(tuple(rounds))
    return found


def _round(profilers: Profilers, backbone: ActorHandle, encoder: ActorHandle, window_s: float) -> float:
    def repeated(*actors: ActorHandle) -> list[float]:
        (now_s,) = profilers.answers([backbone.now_s.remote()])  # the clock of the actors' node
        begin_s = now_s + _LEAD_S
        end_s = begin_s + len(actors) * window_s
        return profilers.measured([actor.repeat.remote(begin_s, end_s) for actor in actors])

    alone, together = [*repeated(backbone), *repeated(encoder)], repeated(backbone, encoder)
    if profilers.kind == "CPU":  # these are processor seconds, of which each gets half
        together = [len(together) * seconds for seconds in together]
    return interference_factor(alone, together)


@dataclass(frozen=True, slots=True)
class OfTwo:
    """What two devices have in common. All but the link is measured on CPUs alone."""

    link: float
    """Between them, in bytes/s."""
    steps: Mapping[Sharded, ReplicaSteps]
    """Of two replicas, by sharding."""
    messages_s: float
    launch_s: float
    """Both as ``StepCosts``."""


def measure_two(profilers: Profilers, mixes: Sequence[Mix]) -> OfTwo:
    """Measure two ranks on a device each. mixes: of the replicas' steps, in turn."""
    degrees, steps, messages_s, launch_s = Degrees(dp=2), dict[Sharded, ReplicaSteps](), 0.0, 0.0
    with profilers.started([(rank, degrees) for rank in range(2)]) as actors:
        (port,) = profilers.answers([actors[0].open_rendezvous.remote(LOOPBACK)])
        reports = profilers.answers([actor.start.remote(LOOPBACK, port) for actor in actors])
        if profilers.kind == "CPU":
            messages_s = fmean(profilers.measured([actor.messages_s.remote() for actor in actors]))
            launch_s = fmean(profilers.measured([actor.launch_s.remote() for actor in actors]))
            for sharding in get_args(Sharded):
                found = profilers.measured([actor.replica_steps.remote(mixes, sharding) for actor in actors])
                steps[sharding] = mean_steps(found)
    return OfTwo(min(report.link or 0.0 for report in reports), steps, messages_s, launch_s)
