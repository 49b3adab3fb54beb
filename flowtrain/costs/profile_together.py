"""What a profile knows of processes that run at once: encoder and backbone on a device, replicas, the host's work."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from flowtrain.costs.flops import FloatArray

ASSUMED_INTERFERENCE = 1.0
"""Counted where no profile has measured it: both take no longer together than one after the other."""

STEP_CALLS = 6
"""Calls to the coordinator in each step, whatever it has: feeding, planning, the end of the step, the driver's."""
BATCH_CALLS, MICROBATCH_CALLS = 2, 1
"""A batch of images is leased and handed in; a microbatch is located."""

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
    """Processor seconds of feeder and coordinator, which share the cores where cores are the devices."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    sample_s: _Amount
    """Per sample: reading, sizing, tokenising, putting into the pool."""
    call_s: _Amount
    """Per call to the coordinator, at its end."""

    def seconds(self, num_samples: float, num_batches: float, num_microbatches: FloatArray) -> FloatArray:
        """Return processor seconds a step over all cores; num_batches: of images that encoder actors lease."""
        calls = STEP_CALLS + BATCH_CALLS * num_batches + MICROBATCH_CALLS * num_microbatches
        return num_samples * self.sample_s + calls * self.call_s
