"""The prefetch thread of a backbone rank fetches plans and microbatches ahead of the training thread."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import TypeVar

from flowtrain.actors.leading import Leader, Order, follow
from flowtrain.actors.link import CoordinatorLink, Patience
from flowtrain.actors.reading import Fetched, MicrobatchReader
from flowtrain.actors.replica_channel import COLLECTIVE_MARGIN_S, ReplicaChannel, portable
from flowtrain.config.flow import LimitsConfig
from flowtrain.errors import OwnerLostError
from flowtrain.types.messages import LocatedTexts
from flowtrain.types.plan import StepPlan

T = TypeVar("T")
logger = logging.getLogger(__name__)

POLL_S = 0.5
"""How often a waiting thread checks its limit and whether it must end."""
ABANDON_S = 2.0
"""Longest wait for the thread of a rank that has failed."""
WAY_OUT = "more encoders or feeders, or more CPUs for them, shorten such waits"
READ, LOST, FAILED = range(3)
"""How a rank's reading of a microbatch ended; the worst result of all ranks counts."""


class QueueRoom:
    """The room of a queue of microbatches. See ``Room``.

    depth: microbatches that may wait in the queue while one more is read; half of them are asked for at once.
    """

    def __init__(self, microbatches: queue.Queue[Fetched | None], depth: int) -> None:
        self._microbatches = microbatches
        self._size = depth + 1
        self.batch = (depth + 1) // 2
        self._taken = threading.Condition()

    def free(self) -> int:
        """See ``Room``."""
        return self._size - self._microbatches.qsize()

    def wait_for(self, count: int) -> bool:
        """See ``Room``."""
        with self._taken:
            return self._taken.wait_for(lambda: self.free() >= count, POLL_S)

    def note_taken(self) -> None:
        """Wake a thread that waits for room."""
        with self._taken:
            self._taken.notify()


class Prefetcher:
    """Fetches unit after unit in the order of the run; ``next_plan`` and ``next_microbatch`` return them in order.

    The leader's thread asks the coordinator, and the threads of all ranks of the replica carry out the same orders.
    They deliver each microbatch once all of them have read it; later ones wait for one whose owner died, which the
    leader asks for again. Only the leader's queue limits how far the replica reads ahead. The threads themselves wait
    without a limit, since they may be far ahead; ``limits`` hold for the training thread, which waits for them.

    name: of the rank's actor, for messages.
    link: of the leader; unused on the other ranks.
    channel: connects the prefetch threads of the replica's ranks.
    dp_rank: the replica.
    reader: reads for this rank.
    depth: microbatches that may wait assembled.
    arrival: take any microbatch that is READY next, instead of the plan's order.
    first_unit: index of the first unit that it fetches.
    whole_units: deliver no microbatch of a unit before all are read (``pool.exchange: point_to_point``).
    """

    def __init__(
        self,
        *,
        name: str,
        link: CoordinatorLink,
        channel: ReplicaChannel,
        dp_rank: int,
        reader: MicrobatchReader,
        limits: LimitsConfig,
        depth: int,
        arrival: bool,
        first_unit: int,
        whole_units: bool = False,
    ) -> None:
        self._name = name
        self._whole_units = whole_units
        self._channel = channel
        self._reader = reader
        self._limits = limits
        # Slots of the current unit that are not delivered yet, in their order. None: lost; it and all after it wait.
        self._kept: dict[int, Fetched | None] = {}
        self._stopping = threading.Event()
        self._failed = threading.Event()
        self._error: BaseException | None = None
        self._plan: StepPlan | None = None
        self._has_delivered = False
        # None: look at the error.
        self._plans: queue.Queue[StepPlan | None] = queue.Queue()
        # The leader asks only for what it has room for, so no rank's queue needs a limit.
        self._microbatches: queue.Queue[Fetched | None] = queue.Queue()
        self._room = QueueRoom(self._microbatches, depth)
        self._leader: Leader | None = None
        if channel.is_leader:
            self._leader = Leader(
                link,
                channel,
                dp_rank,
                lead=reader.lead,
                room=self._room,
                arrival=arrival,
                first_unit=first_unit,
                stopping=self._stopping,
            )
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def next_plan(self) -> StepPlan:
        """Wait for the next unit's plan. Raises the error that ended the thread, and StallError at the limit."""
        return self._take(self._plans)

    def next_microbatch(self) -> Fetched:
        """Wait for the next microbatch of the unit whose plan was taken last; raises as ``next_plan``."""
        fetched = self._take(self._microbatches)
        self._has_delivered = True
        self._room.note_taken()
        return self._reader.complete(fetched)

    def close(self, failed: bool = False) -> None:
        """End the thread and drop what it fetched ahead. Idempotent.

        failed: this rank has failed. Otherwise the thread of another rank than the leader ends with the leader's.
        """
        if failed:
            self._failed.set()
        self._stopping.set()
        self._thread.join(timeout=ABANDON_S if failed else self._limits.stop_timeout_s)

    def _take(self, items: queue.Queue[T | None]) -> T:
        patience = self._patience()
        while True:
            try:
                item = items.get(timeout=POLL_S)
            except queue.Empty:
                item = None
            if item is not None:
                return item
            if self._error is not None:
                raise self._error
            patience.tick()

    def _patience(self) -> Patience:
        limits = self._limits
        changes: dict[str, float] = {}
        if not self._has_delivered:  # producers load their models meanwhile
            changes["stall_warning_s"] = max(limits.stall_warning_s, limits.start_limit_s)
        if self._leader is None:  # the leader can say what the replica waits for: it warns, and its limit comes first
            changes["stall_timeout_s"] = limits.stall_timeout_s + COLLECTIVE_MARGIN_S
        if changes:
            limits = limits.model_copy(update=changes)
        return Patience(self._name, limits, self._describe_wait, warns=self._leader is not None)

    def _describe_wait(self) -> str:
        if self._leader is not None:
            return f"{self._leader.describe_wait()}; {WAY_OUT}"
        return "the first rank of its replica sends nothing, and knows why"

    # --- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for order in self._orders():
                if isinstance(order, StepPlan):
                    self._plan = order
                    self._plans.put(order)
                    continue
                slot = order.location.slot
                self._kept[slot] = fetched = self._read(order)
                if self._leader is not None:
                    self._leader.settled(slot, fetched is not None)
                for complete in self._take_complete():
                    self._hand_over(complete)
        except BaseException as error:  # the training thread raises it at its next wait
            self._error = error
            self._plans.put(None)
            self._microbatches.put(None)
            if self._leader is not None:
                with suppress(Exception):  # it may be the channel that failed
                    self._leader.end(error)

    def _orders(self) -> Iterator[Order]:
        return self._leader.orders() if self._leader is not None else follow(self._channel, self._failed)

    def _read(self, order: LocatedTexts) -> Fetched | None:
        """Read a microbatch with the other ranks; None if an owner died since the answer.

        If a rank failed, the leader raises its error, and ends the orders of the others with it.
        """
        fetched, error = None, None
        if order.texts is not None:
            assert self._plan is not None
            try:
                fetched = self._reader.read(self._plan, order)
            except OwnerLostError as lost:
                logger.info("%s could not read microbatch %d: %s", self._name, order.location.slot, lost)
            except Exception as failure:
                error = failure
        worst = self._channel.highest(FAILED if error is not None else LOST if fetched is None else READ)
        if worst == FAILED:
            errors = self._channel.collect(error and portable(error))
            if errors is not None:
                raise next(each for each in errors if each is not None)
        return fetched if worst == READ else None

    def _take_complete(self) -> Iterator[Fetched]:
        """Take the microbatches that were read, up to the first that is lost."""
        assert self._plan is not None
        if self._whole_units and (len(self._kept) < self._plan.num_slots or None in self._kept.values()):
            return
        while (first := next(iter(self._kept.values()), None)) is not None:
            del self._kept[first.slot]
            yield first

    def _hand_over(self, fetched: Fetched) -> None:
        if self._leader is not None:
            self._leader.before_handing_over()
        self._microbatches.put(fetched)
