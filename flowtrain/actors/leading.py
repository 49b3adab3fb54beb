"""What the ranks of a replica read next: their leader asks the coordinator, the others receive its orders."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from flowtrain.actors.link import CoordinatorLink
from flowtrain.actors.replica_channel import ReplicaChannel, portable
from flowtrain.errors import OwnerLostError
from flowtrain.flow.api import CoordinatorApi
from flowtrain.types.messages import LocatedTexts, MicrobatchLocation
from flowtrain.types.plan import StepPlan


class Room(Protocol):
    """The room for microbatches that wait for the training."""

    batch: int
    """How many are asked for at once, at most."""

    def free(self) -> int:
        """Return for how many there is room."""
        ...

    def wait_for(self, count: int) -> bool:
        """Wait a while until there is room for ``count``; returns whether there is."""
        ...


Order = StepPlan | LocatedTexts
"""The plan of the next unit, or its next microbatch."""
logger = logging.getLogger(__name__)

RETRY_S = 0.05
"""Pause before the leader asks again for the place of a part whose owner died."""


@dataclass(frozen=True)
class _Ended:
    """The leader sends no more orders. error: why, if it failed."""

    error: BaseException | None = None


class Leader:
    """Asks the coordinator for one replica, unit after unit, and shares its orders with the other ranks.

    It asks when there is room for several microbatches, so that a unit takes few questions. A microbatch is released
    once all ranks have read it: with the next question, or before any other wait. So memory that a replica was asked to
    read never waits for its training, nor, while its owner lives, for another replica. While the leader waits it sends
    that there is nothing yet, so no rank's wait for an order reaches its time limit.

    lead: returns what all ranks need of a microbatch: the texts, which it alone reads, and what is known of images.
    room: how many more microbatches may wait for the training.
    arrival: take any microbatch that is READY next, instead of the plan's order.
    stopping: set when the rank wants no more orders.
    """

    def __init__(
        self,
        link: CoordinatorLink,
        channel: ReplicaChannel,
        dp_rank: int,
        *,
        lead: Callable[[MicrobatchLocation], LocatedTexts],
        room: Room,
        arrival: bool,
        first_unit: int,
        stopping: threading.Event,
    ) -> None:
        self._link = link
        self._channel = channel
        self._dp_rank = dp_rank
        self._lead = lead
        self._room = room
        self._arrival = arrival
        self._stopping = stopping
        self._unit, self._slot = first_unit, None  # type: tuple[int, int | None]
        self._num_slots = 0
        self._num_read = 0
        self._next_plan: StepPlan | None = None
        self._unreleased: tuple[int, ...] = ()  # slots of the unit that all ranks have read
        self._lost: dict[int, None] = {}  # slots whose owner died, in the order of delivery

    def describe_wait(self) -> str:
        """Return what the replica waits for."""
        return self._link.ask(CoordinatorApi.describe_wait, self._unit, self._slot, self._dp_rank)

    def orders(self) -> Iterator[Order]:
        """Yield orders until the end of the run. Call ``settled`` after each microbatch."""
        while (plan := self._wait_for_plan()) is not None:
            self._num_slots, self._num_read = plan.num_slots, 0
            yield plan
            while self._num_read < plan.num_slots:
                locations = self._wait_for_locations()
                if not locations:
                    self.end()
                    return
                for location in locations:
                    yield self._with_texts(location)
            self._unit += 1
        self.end()

    def settled(self, slot: int, was_read: bool) -> None:
        """Note whether all ranks have read a microbatch; otherwise its owner died."""
        if was_read:
            self._lost.pop(slot, None)
            self._num_read += 1
            self._unreleased += (slot,)
            return
        self._lost.setdefault(slot)
        # The controller tells the flow, which has the part produced again; a lookup by position finds the new place.
        time.sleep(RETRY_S)

    def before_handing_over(self) -> None:
        """Release what was read if the unit ends with it; the answer mostly has the next plan."""
        if self._unreleased and self._num_read == self._num_slots:
            self._next_plan = self._release(ends=True)

    def _release(self, ends: bool = False) -> StepPlan | None:
        read, self._unreleased = self._unreleased, ()
        return self._link.ask(CoordinatorApi.release, self._unit, read, self._dp_rank, ends).plan

    def has_nothing_yet(self) -> None:
        """Let the other ranks know that this one still waits."""
        self._channel.share(None)

    def end(self, error: BaseException | None = None) -> None:
        """Let the other ranks know that no order follows. error: the reason, which they raise too."""
        self._channel.share(_Ended(None if error is None else portable(error)))

    def _wait_for_plan(self) -> StepPlan | None:
        self._slot = None
        plan, self._next_plan = self._next_plan, None
        if plan is not None:
            self._channel.share(plan)
            return plan
        while not self._stopping.is_set():
            reply = self._link.ask(CoordinatorApi.next_plan, self._unit, self._dp_rank)
            if reply.is_past_end:
                return None
            self._channel.share(reply.plan)
            if reply.plan is not None:
                return reply.plan
        return None

    def _wait_for_locations(self) -> tuple[MicrobatchLocation, ...]:
        """Wait for the next microbatch; returns its place, and those of later ones that have room.

        A lost microbatch comes alone. Empty if the unit will not come.
        """
        while not self._stopping.is_set():
            lost = next(iter(self._lost), None)
            if lost is None and not self._has_room():
                continue
            self._slot = lost if lost is not None else None if self._arrival else self._num_read
            limit = 1 if lost is not None else self._room.free()
            read, self._unreleased = self._unreleased, ()
            reply = self._link.ask(CoordinatorApi.locate, self._unit, self._slot, self._dp_rank, read, limit)
            if reply.locations or reply.is_past_end:
                return reply.locations
            self.has_nothing_yet()
        return ()

    def _has_room(self) -> bool:
        """Wait a while for room for a batch of microbatches, or for all that are left of the unit."""
        wanted = min(self._room.batch, self._num_slots - self._num_read)
        if self._room.free() >= wanted:
            return True
        if self._unreleased:
            self._release()
        if self._room.wait_for(wanted):
            return True
        self.has_nothing_yet()
        return False

    def _with_texts(self, location: MicrobatchLocation) -> LocatedTexts:
        try:
            order = self._lead(location)
        except OwnerLostError as error:
            logger.info("microbatch %d of unit %d is asked for again: %s", location.slot, location.unit, error)
            order = LocatedTexts(location, None)
        if order.rejections:  # before the microbatch can be reported as read
            self._link.ask(CoordinatorApi.reject, self._dp_rank, order.rejections)
        self._channel.share(order)
        return order


def follow(channel: ReplicaChannel, leaving: threading.Event) -> Iterator[Order]:
    """Yield the leader's orders until it ends them; raises the error for which it ended.

    leaving: set when this rank has failed; it then takes no further order.
    """
    while True:
        message = channel.share()
        if leaving.is_set():
            return
        if isinstance(message, _Ended):
            if message.error is not None:
                raise message.error
            return
        if message is not None:
            yield message
