"""What the end of an actor's call means, in one readable line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray

from flowtrain.errors import FlowTrainError

SEVERED = (ray.exceptions.RayActorError, ray.exceptions.NodeDiedError, ray.exceptions.OutOfMemoryError)


@dataclass(frozen=True)
class Returned:
    """It ended by itself."""


@dataclass(frozen=True)
class Died:
    """The actor's process is gone."""

    reason: str


@dataclass(frozen=True)
class Failed:
    """It raised: in the call, or when the actor was constructed."""

    error: BaseException


Outcome = Returned | Died | Failed


def outcome_of(ref: ray.ObjectRef[Any], name: str) -> Outcome:
    """Look at a call to an actor that is done."""
    try:
        ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        return Failed(error.cause)
    except SEVERED as error:
        if _init_failed(error):  # Ray does not try that again, so neither do we
            return Failed(FlowTrainError(f"{name} could not be constructed: {reason_of(error)}"))
        return Died(reason_of(error))
    except ray.exceptions.RayError as error:
        return Failed(error)
    return Returned()


def root_cause_first(outcomes: dict[str, Outcome]) -> list[str]:
    """Order the names of those that ended together: a death explains the failures beside it, our errors Ray's."""

    def rank(name: str) -> int:
        outcome = outcomes[name]
        if isinstance(outcome, Died):
            return 0
        return 1 if isinstance(outcome, Failed) and isinstance(outcome.error, FlowTrainError) else 2

    return sorted(outcomes, key=rank)


def reason_of(error: BaseException) -> str:
    """Why an actor is gone, as Ray says it behind its table of identifiers."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("\t")]
    if not lines:
        return type(error).__name__
    if _init_failed(error):
        return lines[-1]  # the exception, below its remote traceback
    told = lines[1:] or lines  # the first one says that it died, which the caller says anyway
    return told[0].rstrip(".")


def _init_failed(error: BaseException) -> bool:
    return isinstance(error, ray.exceptions.RayActorError) and error.actor_init_failed
