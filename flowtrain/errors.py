"""Exceptions that FlowTrain raises on purpose.

Each message names what went wrong, where, and what to do. The exceptions keep their arguments in ``args``, so that they
survive pickling: Ray sends them between processes.
"""

from __future__ import annotations


class FlowTrainError(Exception):
    """Base of every error that FlowTrain raises on purpose. ``str(error)`` is a complete message for users."""


class ConfigError(FlowTrainError, ValueError):
    """A configuration was refused. The message names file, key, value and the way out; the CLI exits with code 2."""


class ResourceError(FlowTrainError, RuntimeError):
    """The cluster or the machine lacks something. The message gives both counts. Raised before work starts."""


class DataError(FlowTrainError, RuntimeError):
    """The data as a whole cannot be used: a missing file, an unknown schema, too many rejected samples."""


class SourceReadError(FlowTrainError, OSError):
    """A source could not be read after retries. It fails the run; it never becomes a rejected sample."""


class ScheduleError(FlowTrainError, ValueError):
    """Pipeline action lists were refused. The message gives the reason and shows the lists around the wrong actions."""


class PoolError(FlowTrainError, RuntimeError):
    """Base of the memory pool's errors."""


class OutOfPoolMemory(PoolError, MemoryError):
    """A segment has no room. The message gives bytes asked, bytes free, largest free block and the knob."""


class AddressError(PoolError, ValueError):
    """A global virtual address is out of range, freed, or belongs to another process."""


class OwnerLostError(PoolError):
    """The process that owned an extent is gone; ask the coordinator again by position."""


class StaleLeaseError(FlowTrainError, RuntimeError):
    """A part was reported under a lease that is no longer valid; the reporter must free its bytes."""


class CheckpointError(FlowTrainError, RuntimeError):
    """A checkpoint is missing, incomplete, or does not belong to this configuration."""


class StallError(FlowTrainError, TimeoutError):
    """A wait passed its limit. The message names who waited, for what, and for how long."""


class ReplicaLostError(FlowTrainError, RuntimeError):
    """A process of an encoder's tensor parallel group is gone, so the others cannot go on. The message names it."""


class WorkerLostError(FlowTrainError, RuntimeError):
    """An actor died that cannot be replaced while the run goes on. The message names it and how to resume."""
