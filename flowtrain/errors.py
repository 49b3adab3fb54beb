"""Exceptions that FlowTrain raises on purpose.

Each message names what went wrong, where, and what to do. The exceptions keep their arguments in ``args``, so that they
survive pickling: Ray sends them between processes.
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
    """Base of every error that FlowTrain raises on purpose. ``str(error)`` is a complete message for users."""


class ConfigError(FlowTrainError, ValueError):
    """A configuration was refused. The message names file, key, value and the way out; the CLI exits with code 2.

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
    """The cluster or the machine lacks something. The message gives both counts. Raised before work starts."""


class DataError(FlowTrainError, RuntimeError):
    """The data as a whole cannot be used: a missing file, an unknown schema, too many rejected samples."""


class RefusedDataError(ConfigError, DataError):
    """The data cannot be used, found before work started: bad input, so the CLI exits with code 2."""


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


class SnapshotLostError(FlowTrainError, RuntimeError):
    """A snapshot in memory cannot be kept or loaded; a run that starts again then takes its last checkpoint."""


class RunFileError(FlowTrainError, OSError):
    """A file of the run's directory cannot be written. The message names it and the room on its disk."""


class NonFiniteError(FlowTrainError, ArithmeticError):
    """Training has diverged: losses, gradients or weights are not finite. The message names the last checkpoint."""


class StallError(FlowTrainError, TimeoutError):
    """A wait passed its limit. The message names who waited, for what, and for how long."""


class ReplicaLostError(FlowTrainError, RuntimeError):
    """A process of an encoder's tensor parallel group is gone, so the others cannot go on. The message names it."""


class OutdatedError(FlowTrainError, RuntimeError):
    """A rank asks whose backbone was ended and started again."""


class WorkerLostError(FlowTrainError, RuntimeError):
    """An actor died that cannot be replaced while the run goes on. The message names it and how to resume."""


class CoordinatorLostError(WorkerLostError):
    """The coordinator died, and with it the table of where each part lies."""


class CoordinatorSilentError(CoordinatorLostError, StallError):
    """The coordinator does not answer. The message names the question and the limit."""
