"""How an actor talks to the coordinator: one small interface, so that every actor class runs without Ray as well."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import ray
from ray.actor import ActorHandle

from flowtrain.config.flow import LimitsConfig
from flowtrain.errors import FlowTrainError, StallError, WorkerLostError

logger = logging.getLogger(__name__)

ANSWER_MARGIN_S = 120.0
"""How much later than asked an answer may come before the coordinator counts as unreachable (a loaded machine)."""


class CoordinatorLink(ABC):
    """Calls the coordinator's methods by name."""

    @property
    @abstractmethod
    def node_id(self) -> str:
        """The node of this process: equal for processes that share memory."""

    @abstractmethod
    def call(self, method: str, *args: Any) -> Any:
        """Call and wait for the answer."""


class RayLink(CoordinatorLink):
    """The coordinator as a Ray actor. Any thread may ``call``."""

    def __init__(self, coordinator: ActorHandle) -> None:
        self._coordinator = coordinator

    @property
    def node_id(self) -> str:
        """The Ray node that this process runs on."""
        return str(ray.get_runtime_context().get_node_id())

    def call(self, method: str, *args: Any) -> Any:
        """Call and wait; raises what the method raised, StallError without an answer, WorkerLostError if it is gone."""
        try:
            return ray.get(getattr(self._coordinator, method).remote(*args), timeout=ANSWER_MARGIN_S)
        except ray.exceptions.GetTimeoutError as error:
            raise StallError(f"the coordinator did not answer ({method}) within {ANSWER_MARGIN_S:g} s") from error
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, FlowTrainError):
                raise error.cause from error  # Ray's own would have the remote traceback as its message
            raise
        except ray.exceptions.RayActorError as error:
            raise WorkerLostError(
                "the coordinator died, and with it the knowledge of what lies where; start again with --resume"
            ) from error


def node_address() -> str:
    """Where other nodes reach this one."""
    return str(ray.util.get_node_ip_address())


class Patience:
    """Counts how long a wait has lasted: warns with the reason after a while, and ends it at the limit.

    describe: asked only when a message is due. limit_s None: the wait may last (a producer waits for its consumer).
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
