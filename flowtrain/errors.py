"""Exceptions that FlowTrain raises on purpose.

Each says what went wrong, where, and what to do. They keep their arguments in ``args`` so that they survive pickling
(Ray carries them between processes).
"""

from __future__ import annotations


class FlowTrainError(Exception):
    """Base of every error that FlowTrain raises on purpose; `str(error)` is complete and readable by a user."""


class ConfigError(FlowTrainError, ValueError):
    """A configuration was refused; the message names file, key, value and the way out. The CLI exits with code 2."""


class ResourceError(FlowTrainError, RuntimeError):
    """The cluster or the machine lacks something; the message gives both counts. Raised before work starts."""


class DataError(FlowTrainError, RuntimeError):
    """The data cannot be used as a whole (a missing file, an unknown schema, too many rejected samples)."""


class SourceReadError(FlowTrainError, OSError):
    """A source could not be read after retries. It fails the run; it never becomes a rejected sample."""


class ScheduleError(FlowTrainError, ValueError):
    """Pipeline action lists were refused; the message says why and shows the lists around the actions concerned."""


class PoolError(FlowTrainError, RuntimeError):
    """Base of the memory pool's errors."""


class OutOfPoolMemory(PoolError, MemoryError):
    """A segment has no room; the message gives bytes asked, bytes free, largest free block and the knob."""


class AddressError(PoolError, ValueError):
    """A global virtual address is out of range, freed, or belongs to somebody else."""


class OwnerLostError(PoolError):
    """The process that owned an extent is gone; ask the coordinator again by position."""


class StaleLeaseError(FlowTrainError, RuntimeError):
    """A part was reported under an epoch that is no longer valid; its bytes must be freed by the reporter."""


class CheckpointError(FlowTrainError, RuntimeError):
    """A checkpoint is missing, incomplete, or does not belong to this configuration."""


class StallError(FlowTrainError, TimeoutError):
    """A wait passed its limit; the message says who waited for what, and for how long."""


class ReplicaLostError(FlowTrainError, RuntimeError):
    """A process of an encoder's tensor parallel group is gone, so that the others are of no use; names them."""


class WorkerLostError(FlowTrainError, RuntimeError):
    """An actor that cannot be replaced while running died; the message names it and how to resume."""
