"""How an actor talks to the coordinator: one small interface, so that every actor class runs without Ray as well."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.actor import ActorHandle

from flowtrain.config.flow import LimitsConfig
from flowtrain.errors import FlowTrainError, StallError, WorkerLostError

logger = logging.getLogger(__name__)

ANSWER_MARGIN_S = 120.0
"""How much later than asked an answer may come before the coordinator counts as unreachable (a loaded machine)."""


P = ParamSpec("P")
R = TypeVar("R")
Question = Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]
"""A method of ``CoordinatorApi``, which gives a call its arguments' types and its answer's."""


class CoordinatorLink(ABC):
    """Asks the coordinator what ``CoordinatorApi`` lists."""

    @property
    @abstractmethod
    def node_id(self) -> str:
        """The node of this process: equal for processes that share memory."""

    @abstractmethod
    def ask(self, question: Question[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Ask and wait for the answer, as ``link.ask(CoordinatorApi.begin, unit)``."""


class RayLink(CoordinatorLink):
    """The coordinator as a Ray actor. Any thread may ask."""

    def __init__(self, coordinator: ActorHandle) -> None:
        self._coordinator = coordinator

    @property
    def node_id(self) -> str:
        """The Ray node that this process runs on."""
        return str(ray.get_runtime_context().get_node_id())

    def ask(self, question: Question[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Ask and wait; raises what the method raised, StallError without an answer, WorkerLostError if it is gone."""
        try:
            return ray.get(self.start(question, *args, **kwargs), timeout=ANSWER_MARGIN_S)
        except ray.exceptions.GetTimeoutError as error:
            name = question.__name__
            raise StallError(f"the coordinator did not answer ({name}) within {ANSWER_MARGIN_S:g} s") from error
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, FlowTrainError):
                raise error.cause from error  # Ray's own would have the remote traceback as its message
            raise
        except ray.exceptions.RayActorError as error:
            raise WorkerLostError(
                "the coordinator died, and with it the knowledge of what lies where; start again with --resume"
            ) from error

    def start(self, question: Question[P, R], *args: P.args, **kwargs: P.kwargs) -> ray.ObjectRef[R]:
        """Ask without waiting; ``ray.get`` of what it returns has the answer."""
        reference: ray.ObjectRef[R] = getattr(self._coordinator, question.__name__).remote(*args, **kwargs)
        return reference


def node_address() -> str:
    """Where other nodes reach this one."""
    return str(ray.util.get_node_ip_address())


class Patience:
    """Counts how long a wait has lasted: warns with the reason after a while, and ends it at the limit.

    describe: called only when a message is due. endless: the wait has no limit (a producer waits for its consumer).
    """

    def __init__(self, who: str, limits: LimitsConfig, describe: Callable[[], str], endless: bool = False) -> None:
        self._who = who
        self._describe = describe
        self._warning_s = limits.stall_warning_s
        self._limit_s = None if endless else limits.stall_timeout_s
        self._started = time.monotonic()
        self._next_warning_s = self._warning_s

    def tick(self) -> None:
        """Call after every attempt that brought nothing. Raises StallError at the limit."""
        waited_s = time.monotonic() - self._started
        if self._limit_s is not None and waited_s >= self._limit_s:
            raise StallError(
                f"{self._who} waited {waited_s:.0f} s, the limit of limits.stall_timeout_s: {self._describe()}"
            )
        if waited_s >= self._next_warning_s:
            self._next_warning_s += self._warning_s
            logger.warning("%s has waited %.0f s: %s", self._who, waited_s, self._describe())
