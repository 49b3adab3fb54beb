"""Exceptions that FlowTrain raises on purpose.

Each says what went wrong, where, and what to do. They keep their arguments in ``args`` so that they survive pickling
(Ray carries them between processes).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class FaultCode(enum.StrEnum):
    """What is wrong with a configuration, for code that decides by it."""

    KEY = "key"
    """A key is unknown, or one is missing."""
    VALUE = "value"
    """A key's value is of the wrong type, or out of range, or names a file that is not there."""
    CONFLICT = "conflict"
    """Two keys contradict each other."""
    DEGREES = "degrees"
    """The model, the batch or the devices do not allow a parallel degree."""
    ENCODERS = "encoders"
    """The encoders are not those that the run's family, or its plan, has."""
    POOL = "pool"
    """A segment of the memory pool has the wrong size for the run."""
    RESUME = "resume"
    """A resumed run must keep the key's value."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with a configuration."""

    key: str
    """Dotted, as in ``training.max_steps``: what a user would change; empty where it is no single key."""
    code: FaultCode
    text: str
    """What a user reads: the key, the values and the way out."""


class FlowTrainError(Exception):
    """Base of every error that FlowTrain raises on purpose; `str(error)` is complete and readable by a user."""


class ConfigError(FlowTrainError, ValueError):
    """A configuration was refused; the message names file, key, value and the way out. The CLI exits with code 2.

    faults: each fault that the message shows; empty where it is not about keys, as of a file that cannot be read.
    """

    def __init__(self, message: str, faults: Sequence[Fault] = ()) -> None:
        super().__init__(message)
        self.faults = tuple(faults)  # pickled with the exception's other attributes

    @classmethod
    def of(cls, key: str, code: FaultCode, text: str) -> ConfigError:
        """Build it of one fault, whose text is the whole message."""
        return cls(text, [Fault(key, code, text)])


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
