"""How an actor asks the coordinator: one small interface, so that every actor class also runs without Ray."""

from __future__ import annotations

import logging
import math
import pickle
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.actor import ActorHandle

from flowtrain.actors.questions import Asker, FailedQuestion, QuestionServer, RemoteTraceback
from flowtrain.config.flow import LimitsConfig
from flowtrain.errors import CoordinatorLostError, CoordinatorSilentError, FlowTrainError, StallError
from flowtrain.types.memory import SocketOffer

logger = logging.getLogger(__name__)

ANSWER_MARGIN_S = 120.0
"""The coordinator counts as unreachable when an answer takes longer than this (machines may be loaded)."""

PICKLE_PROTOCOL = 5

P = ParamSpec("P")
R = TypeVar("R")
Question = Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]
"""A method of ``CoordinatorApi``; it gives a call the types of its arguments and of its answer."""


class Answering:
    """An actor that a ``RayLink`` asks. A question is one packed argument, since Ray serializes each by itself."""

    _questions: QuestionServer | None = None

    async def offer(self, node_id: str) -> SocketOffer | None:
        """Return where processes of this node ask without Ray; None for other nodes."""
        if node_id != ray.get_runtime_context().get_node_id():
            return None
        if self._questions is None:
            self._questions = QuestionServer(self.answer)
        return await self._questions.open()

    async def answer(self, question: bytes) -> bytes:
        """Answer a packed question: the name of a method and its arguments. Returns the packed answer."""
        name, args, kwargs, generation = pickle.loads(question)
        self._admit(generation)
        return self._packed(await getattr(self, name)(*args, **kwargs))

    def _admit(self, generation: int | None) -> None:
        """Raise an error unless askers of this generation still count."""

    def _packed(self, answer: object) -> bytes:
        return pickle.dumps(answer, PICKLE_PROTOCOL)


class CoordinatorLink(ABC):
    """Asks the coordinator the questions that ``CoordinatorApi`` lists."""

    @property
    @abstractmethod
    def node_id(self) -> str:
        """Id of this process's node; equal for processes that share memory."""

    @abstractmethod
    def ask(self, question: Question[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Ask and wait for the answer: ``link.ask(CoordinatorApi.begin, unit)``."""


class RayLink(CoordinatorLink):
    """The coordinator as a Ray actor, of a class that is ``Answering``. Any thread may ask.

    On the coordinator's own node questions go over a socket, on others through Ray.

    generation: of the backbone that asks; None: not a rank of it.
    patience_s: the longest wait for an answer; kept in this process alone.
    """

    def __init__(
        self, coordinator: ActorHandle, generation: int | None = None, patience_s: float = ANSWER_MARGIN_S
    ) -> None:
        self._coordinator = coordinator
        self._generation = generation
        self._patience_s = patience_s
        self._opening = threading.Lock()
        self._is_open = False
        self._asker: Asker | None = None

    def __reduce__(self) -> tuple[type[RayLink], tuple[ActorHandle, int | None]]:
        return RayLink, (self._coordinator, self._generation)  # each process opens its own connections

    @property
    def node_id(self) -> str:
        """Id of the Ray node that this process runs on."""
        return node_id()

    def ask(self, question: Question[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Ask and wait. Raises what the method raised, or CoordinatorLostError, also without an answer in time."""
        packed = pickle.dumps((question.__name__, args, kwargs, self._generation), PICKLE_PROTOCOL)
        try:
            asker = self._asker if self._is_open else self._opened()
            answer = asker.ask(packed) if asker is not None else self._through_ray(packed)
            reply: R = pickle.loads(answer)
            return reply
        except (ray.exceptions.GetTimeoutError, TimeoutError) as error:
            name = question.__name__
            raise CoordinatorSilentError(
                f"the coordinator did not answer ({name}) within {self._patience_s:g} s"
            ) from error
        except FailedQuestion as failed:
            raise failed.error from RemoteTraceback(failed.traceback)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, FlowTrainError):
                raise error.cause from error  # Ray's own error would have the remote traceback as its message
            raise
        except (ray.exceptions.RayActorError, EOFError, ConnectionError) as error:
            raise CoordinatorLostError(
                "the coordinator died, and with it the table of where each part lies; start again with --resume"
            ) from error

    def _through_ray(self, packed: bytes) -> bytes:
        reference: ray.ObjectRef[bytes] = self._coordinator.answer.remote(packed)
        answer: bytes = ray.get(reference, timeout=self._patience_s)
        return answer

    def _opened(self) -> Asker | None:
        with self._opening:
            if not self._is_open:
                reference: ray.ObjectRef[SocketOffer | None] = self._coordinator.offer.remote(self.node_id)
                offer = ray.get(reference, timeout=self._patience_s)
                try:
                    self._asker = Asker(offer, self._patience_s) if offer is not None else None
                except OSError as error:  # of one node, but in containers that share no sockets
                    logger.info("questions to the coordinator go through Ray: %s", error)
                self._is_open = True
        return self._asker

    def start(self, question: Question[P, R], *args: P.args, **kwargs: P.kwargs) -> ray.ObjectRef[R]:
        """Ask without waiting; returns a reference for ``ray.get`` and ``ray.wait``."""
        reference: ray.ObjectRef[R] = getattr(self._coordinator, question.__name__).remote(*args, **kwargs)
        return reference


def node_id() -> str:
    """Return the id of this process's Ray node."""
    return str(ray.get_runtime_context().get_node_id())


def node_address() -> str:
    """Return the address at which other nodes reach this one."""
    return str(ray.util.get_node_ip_address())


class Patience:
    """Measures a wait of a consumer: logs warnings with the reason at intervals, and ends the wait at the limit.

    A producer has none: it waits for its consumer wherever the consumer is the bottleneck, as in a healthy run.

    who: name of the process that waits.
    limits: interval of the warnings, and the limit.
    describe: returns the reason of the wait; called only when a message is due.
    warns: False where another process logs the same wait.
    """

    def __init__(self, who: str, limits: LimitsConfig, describe: Callable[[], str], warns: bool = True) -> None:
        self._who = who
        self._describe = describe
        self._warning_s = limits.stall_warning_s
        self._limit_s = limits.stall_timeout_s
        self._started = time.monotonic()
        self._next_warning_s = self._warning_s if warns else math.inf

    def tick(self) -> None:
        """Call after every attempt without a result. Raises StallError at the limit."""
        waited_s = time.monotonic() - self._started
        if waited_s >= self._limit_s:
            raise StallError(
                f"{self._who} waited {waited_s:.0f} s, the limit of limits.stall_timeout_s: {self._describe()}"
            )
        if waited_s >= self._next_warning_s:
            self._next_warning_s += self._warning_s
            logger.warning("%s has waited %.0f s: %s", self._who, waited_s, self._describe())
