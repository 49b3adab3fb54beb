"""What the end of an actor's call means, in one readable line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
import torch.distributed as dist

from flowtrain.emulation.meetings import OtherRankFailedError
from flowtrain.errors import FlowTrainError

SEVERED = (ray.exceptions.RayActorError, ray.exceptions.NodeDiedError, ray.exceptions.OutOfMemoryError)


@dataclass(frozen=True)
class Returned:
    """The call returned."""


@dataclass(frozen=True)
class Died:
    """The actor's process is gone."""

    reason: str


@dataclass(frozen=True)
class Failed:
    """The call, or the actor's construction, raised."""

    error: BaseException

    @property
    def lost_peer(self) -> bool:
        """Whether a collective failed: another rank has ended, or hangs."""
        if isinstance(self.error, FlowTrainError):
            return False
        return isinstance(self.error, dist.DistError) or _GLOO in str(self.error)


Outcome = Returned | Died | Failed

# Ray describes a dead worker by its kind of exit, the detail, and a paragraph of possible causes.
_BEFORE_DETAIL, _AFTER_DETAIL = "Worker exit detail: ", " Some common causes"
_IN_OUR_WORDS = {
    "connection error code 2. End of file": "its process was killed, or crashed",
    "its node has died": "its node is gone",
    "The actor is temporarily unavailable": "its process cannot be reached",
}
"""Ray's words for what happens most, and ours."""
_GLOO = "gloo/"
"""In the text of gloo's errors, which are RuntimeErrors: the file that raised."""
_Key = TypeVar("_Key")


def outcome_of(ref: ray.ObjectRef[Any], name: str) -> Outcome:
    """Classify a call to an actor that is done."""
    try:
        ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        # The cause may be an argument: the answer of another actor, which is gone. This one is lost with it.
        return _severed(error.cause, name) if isinstance(error.cause, SEVERED) else Failed(error.cause)
    except SEVERED as error:
        return _severed(error, name)
    except ray.exceptions.RayError as error:
        return Failed(error)
    return Returned()


def _severed(error: BaseException, name: str) -> Died | Failed:
    if _init_failed(error):  # Ray does not retry this, nor do we
        return Failed(FlowTrainError(f"{name} could not be constructed: {reason_of(error)}"))
    return Died(reason_of(error))


def root_cause_first(outcomes: Mapping[_Key, Outcome]) -> list[_Key]:
    """Order calls that ended together: deaths first, since they explain failures; our errors before Ray's.

    Last are those that failed only because another did.
    """

    def rank(key: _Key) -> int:
        outcome = outcomes[key]
        if isinstance(outcome, Died):
            return 0
        if isinstance(outcome, Failed) and (outcome.lost_peer or isinstance(outcome.error, OtherRankFailedError)):
            return 3
        return 1 if isinstance(outcome, Failed) and isinstance(outcome.error, FlowTrainError) else 2

    return sorted(outcomes, key=rank)


def reason_of(error: BaseException) -> str:
    """Why an actor is gone: in our words for the common causes, else in Ray's, without its table of identifiers."""
    return next((ours for rays, ours in _IN_OUR_WORDS.items() if rays in str(error)), None) or _in_rays_words(error)


def _in_rays_words(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("\t")]
    if not lines:
        return type(error).__name__
    if _init_failed(error):
        return lines[-1]  # the exception, below its remote traceback
    line = (lines[1:] or lines)[0]  # the first line only says that it died, as the caller does
    _, _, detail = line.rpartition(_BEFORE_DETAIL)
    return detail.partition(_AFTER_DETAIL)[0].rstrip(". ")


def _init_failed(error: BaseException) -> bool:
    return isinstance(error, ray.exceptions.RayActorError) and error.actor_init_failed
