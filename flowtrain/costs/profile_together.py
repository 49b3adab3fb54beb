"""What a profile knows of processes that run at once: encoder and backbone on a device, replicas, the host's work."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import ConfigDict, Field

from flowtrain.costs.flops import FloatArray
from flowtrain.types.profile import ReplicaSteps

ASSUMED_INTERFERENCE = 1.05
"""Counted where no profile has measured it: kernels of two processes on one device cost each other some time."""

STEP_CALLS, REPLICA_CALLS, MICROBATCH_CALLS, BATCH_CALLS = 2, 2, 1, 2
"""Calls to the coordinator. A step: the feeder's and the driver's; a replica releases and finishes the step; a
microbatch is located; a batch of images is leased and handed in."""

Sharded = Literal["full", "gradients"]
"""How replicas share parameters: always, or only between steps; under hybrid sharding a group does as in ``full``."""

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Interference:
    """An encoder and the backbone at once on one device: the time for both over the sum of both alone."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    factors: Annotated[tuple[_Positive, ...], Field(min_length=1)]
    """Of each measured round."""

    @property
    def factor(self) -> float:
        """The median; below 1 where they overlap, above 1 where they slow each other down."""
        return statistics.median(self.factors)


@dataclass(frozen=True, slots=True)
class ReplicaCosts:
    """Seconds of a rank of two that share their parameters, in addition to its work alone; on CPUs, without overlap.

    Amounts per parameter count all parameters of the rank before they are shared.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    microbatch_s: _Amount
    """Per microbatch: gathers."""
    microbatch_parameter_s: _Amount
    """Per microbatch and parameter."""
    step_s: _Amount
    """Per step: the reduction, and the gather where parameters stay whole during a step."""
    parameter_s: _Amount
    """Per step and parameter."""

    def gathering_s(self, parameters: FloatArray, replicas: FloatArray) -> FloatArray:
        """Return seconds a microbatch for ranks of ``replicas`` that share ``parameters``; all arrays are ``[N]``."""
        return _of_two(replicas) * (self.microbatch_s + self.microbatch_parameter_s * parameters)

    def reducing_s(self, parameters: FloatArray, replicas: FloatArray) -> FloatArray:
        """Return seconds a step, as ``gathering_s``."""
        return _of_two(replicas) * (self.step_s + self.parameter_s * parameters)


def _of_two(replicas: FloatArray) -> FloatArray:
    """A rank of n moves (n - 1) / n of all bytes; this in proportion to a rank of two. None moves any alone."""
    share: FloatArray = 2.0 * (replicas - 1.0) / replicas
    return share


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Processor seconds of the feeder, the coordinator and the driver, which share the cores that are the devices."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    sample_s: _Amount
    """Per sample: reading, sizing, tokenising, copying."""
    asking_s: _Amount
    """Per call to the coordinator, in the process that asks; encoders and ranks count theirs themselves."""
    answering_s: _Amount
    """Per call to the coordinator, in the coordinator."""

    def seconds(
        self, num_samples: float, num_batches: float, num_microbatches: FloatArray, replicas: FloatArray
    ) -> FloatArray:
        """Return processor seconds a step over all cores, ``[N]``.

        num_batches: of images, which encoder actors lease. num_microbatches: of all replicas.
        """
        calls = STEP_CALLS + BATCH_CALLS * num_batches + MICROBATCH_CALLS * num_microbatches + REPLICA_CALLS * replicas
        return num_samples * self.sample_s + STEP_CALLS * self.asking_s + calls * self.answering_s


def encoding_adds_s(encode_s: FloatArray, work_s: FloatArray, slowdown: float) -> FloatArray:
    """Return the seconds that encoding adds to a device's other work; all arrays have one shape.

    Both slow each other down while they compute at once. slowdown: see ``Interference.factor``.
    """
    added: FloatArray = encode_s + 2.0 * (slowdown - 1.0) * np.minimum(encode_s, work_s)
    return added


def interference_factor(alone: Sequence[float], together: Sequence[float]) -> float:
    """Return the time of processes at once on a device over the sum of their times alone.

    alone, together: seconds of a piece of work of each process, by itself and while all others work too.
    """
    return 1.0 / sum(one / other for one, other in zip(alone, together, strict=True))


def line_through(numbers: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Return (seconds at 0, seconds per unit) of the line through two points, the smaller number first.

    If one of them is negative, which is noise: none at 0, and the line from there through the larger number's point.
    No units at all (nothing is trained) tell nothing of one unit.
    """
    (fewer, more), (shallow, deep) = numbers, (max(each, 0.0) for each in seconds)
    if not more:
        return deep, 0.0
    slope = (deep - shallow) / max(more - fewer, 1)
    fixed = shallow - slope * fewer
    return (fixed, slope) if slope >= 0.0 and fixed >= 0.0 else (0.0, deep / max(more, 1))


def replica_costs(alone: ReplicaSteps, shared: ReplicaSteps, step_s: float, parameter_s: float) -> ReplicaCosts:
    """Return what two ranks pay for sharing parameters, from the same steps of one rank alone and of both.

    step_s, parameter_s: of a step alone, as in ``StepCosts``; each of both updates half of the parameters. What the
    ends of a step take more belongs to the sharing, and so does what its first backward saves less than one alone.
    """
    numbers = shared.num_parameters
    gathering = [both - one for one, both in zip(alone.microbatch_s, shared.microbatch_s, strict=True)]
    updates = [step_s + parameter_s * number / 2.0 for number in numbers]
    saved = [one - both for one, both in zip(alone.first_backward_s, shared.first_backward_s, strict=True)]
    around = [sum(each) for each in zip(shared.beside_s, shared.ends_s, saved, strict=True)]
    reducing = [both - one for one, both in zip(updates, around, strict=True)]
    return ReplicaCosts(*line_through(numbers, gathering), *line_through(numbers, reducing))
