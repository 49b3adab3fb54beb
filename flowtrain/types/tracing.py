"""What actors send for the trace besides spans, and what they are asked to trace."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counter:
    """Values of one actor at one moment, for the trace."""

    actor: str
    """Name of the actor."""
    name: str
    """What is counted."""
    time_s: float
    """On the run's clock, as of ``Span``."""
    values: dict[str, float]
    """Values by name; a viewer stacks them. Finite and not negative."""


@dataclass(frozen=True, slots=True)
class ClockReading:
    """A moment on the coordinator's clocks."""

    clock: str
    """Which monotonic clock it has; processes whose clocks have the same name share one."""
    now_s: float
    """On its monotonic clock."""
    epoch_s: float
    """What turns its monotonic time into the run's clock; it stays the same for the whole run."""


@dataclass(frozen=True, slots=True)
class TraceSteps:
    """Steps that are traced on demand."""

    first: int
    """The first whole step; what happens before it, from the request on, is in the trace too."""
    last: int


@dataclass(frozen=True, slots=True)
class TraceOrder:
    """What an actor traces on demand."""

    last_step: int
    """It ends after this step; it began when the order came."""
    directory: str
    """Where profiles and snapshots go."""
    profiler: bool
    """Run torch's profiler meanwhile."""
    memory: bool
    """Keep the history of allocations meanwhile, and write a snapshot at the end."""
