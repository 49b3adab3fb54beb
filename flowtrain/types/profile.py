"""What profilers measure and report to the driver, which builds the tables of ``costs.profile`` from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """What one device reached in a profiler's process."""

    name: str
    """As torch names it; ``cpu`` for every CPU."""
    flops: float
    """Peak in FLOP/s in the run's compute type, by data sheet or measured."""
    memory_nbytes: int
    """Of the device; of a CPU, one core's share."""
    bandwidth: float
    """Of its memory, in bytes/s."""
    link: float | None
    """Bytes/s that it sends to the group's other devices in an all-reduce; None where it is alone."""


@dataclass(frozen=True, slots=True)
class BackboneTimes:
    """Medians in seconds of the backbone's modules over the measured packed lengths, ascending."""

    layers_s: tuple[float, ...]
    """Of one decoder layer, forward and backward with recomputation; ``[N]``."""
    heads_s: tuple[float, ...]
    """Of final norm, head and loss; ``[N]``."""
    connectors_s: tuple[float, ...]
    """Of the connector over the microbatch's vision tokens; ``[N]``."""
    assembling_s: float
    """Of putting together the longest microbatch."""
    step_s: float
    """Of each step beside its microbatches, whatever the model's size."""
    parameter_s: float
    """Of each step, a parameter that the device clips and updates."""


@dataclass(frozen=True, slots=True)
class EncoderTimes:
    """Medians in seconds of one encoder's forward over image sizes and batch sizes."""

    num_patches: tuple[int, ...]
    """Patches of an image, ascending; ``[P]``."""
    batch: tuple[int, ...]
    """Images of a batch, ascending; ``[B]``."""
    seconds: tuple[tuple[float, ...], ...]
    """Of one forward; ``[P, B]``."""
    decode_s: float
    """Mean of reading, decoding and preprocessing one image in one thread."""
