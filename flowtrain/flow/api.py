"""What may be asked of the coordinator: each question with its arguments and its one type of answer.

Callers name a question by its method here (``link.ask(CoordinatorApi.lease, owner, encoder, free_nbytes)``), so that a
type checker sees arguments and answer on both sides. Every question that waits is answered after a while at the latest,
with nothing; the caller asks again and keeps its own limit, so that a wait can name who waits for what.
"""

from __future__ import annotations

from typing import Protocol

from flowtrain.types.events import Event
from flowtrain.types.memory import SegmentExport
from flowtrain.types.messages import (
    EncoderReport,
    FeedOrder,
    FeedReport,
    HandInReply,
    Joined,
    LeaseOrder,
    LocateReply,
    PlanReply,
    RankReport,
    RoomOrder,
    Span,
)


class CoordinatorApi(Protocol):
    """The questions of feeder, encoders, backbone ranks and driver. Owners are process indices of the pool."""

    # --- pool processes -----------------------------------------------------------------------------------------

    async def join(self, name: str, node_id: str) -> Joined:
        """Take part in the pool under a name; a process that had it before counts as lost."""
        ...

    async def publish(self, export: SegmentExport) -> None:
        """Export a segment, anew after it grew."""
        ...

    async def exports(self) -> tuple[SegmentExport, ...]:
        """Return what all living processes export."""
        ...

    async def process_lost(self, name: str, for_good: bool = False) -> None:
        """Have what the process of a name held produced again; for_good: no other takes its place."""
        ...

    # --- feeder and encoders ------------------------------------------------------------------------------------

    async def feed(self, owner: int, report: FeedReport) -> FeedOrder:
        """Report what the feeder did, then wait for work."""
        ...

    async def wait_for_room(self, owner: int) -> RoomOrder:
        """Wait, with a full segment, for memory or for the end."""
        ...

    async def lease(self, owner: int, encoder: str, free_nbytes: int) -> LeaseOrder:
        """Wait for a batch to encode; free_nbytes: what the segment can take now, before the order frees more."""
        ...

    async def hand_in(self, owner: int, report: EncoderReport) -> HandInReply:
        """Report what an encoder finished."""
        ...

    # --- backbone -----------------------------------------------------------------------------------------------

    async def begin(self, unit: int) -> bool:
        """Ask to run a unit; False means stop. All ranks get the same answer for the same unit."""
        ...

    async def next_plan(self, unit: int) -> PlanReply:
        """Wait for a unit's plan."""
        ...

    async def locate(
        self, unit: int, slot: int | None, rank: int, read: tuple[int, ...] = (), limit: int = 1
    ) -> LocateReply:
        """Wait until a microbatch is READY; returns it with those after it that are, up to ``limit``.

        slot None: any that the rank has not taken. read: slots of the unit that the rank has read since it last asked;
        they are released.
        """
        ...

    async def release(self, unit: int, slots: tuple[int, ...], rank: int) -> None:
        """Note that a rank has read microbatches: it does not need their bytes in the pool any more."""
        ...

    async def finish(self, report: RankReport, spans: tuple[Span, ...]) -> None:
        """Report a unit that a rank finished."""
        ...

    async def checkpoint_written(self, step: int, rank: int, directory: str) -> None:
        """Report that a rank wrote its share of a checkpoint."""
        ...

    async def describe_wait(self, unit: int, slot: int | None, rank: int) -> str:
        """Return who waits for what."""
        ...

    # --- driver -------------------------------------------------------------------------------------------------

    async def events(self) -> tuple[Event, ...]:
        """Wait for something to have happened, and return it."""
        ...

    async def end_events(self) -> None:
        """Answer who waits for events with what there is: everything was reported."""
        ...

    async def take_events(self) -> tuple[Event, ...]:
        """Return what happened since the last call, at once."""
        ...

    async def request_stop(self) -> None:
        """End the run after the step that is running and the evaluation that may follow it."""
        ...
