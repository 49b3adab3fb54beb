"""The questions that the coordinator answers, each with its arguments and its one type of answer.

Callers name a question by its method here (``link.ask(CoordinatorApi.lease, owner, encoder, free_nbytes)``), so that a
type checker sees arguments and answer on both sides. A question that waits too long gets an empty answer. The caller
then asks again and keeps its own limit, so that it can report who waits for what.
"""

from __future__ import annotations

from typing import Protocol

from flowtrain.types.events import Event
from flowtrain.types.memory import SegmentExport
from flowtrain.types.messages import (
    EncoderReport,
    FeedOrder,
    FeedReport,
    FlowSettings,
    HandInReply,
    Joined,
    LeaseOrder,
    LocateReply,
    PlanReply,
    RankReport,
    RoomOrder,
    Span,
)
from flowtrain.types.samples import Rejection
from flowtrain.types.tracing import ClockReading, TraceSteps


class CoordinatorApi(Protocol):
    """The questions of feeders, encoders, backbone ranks and driver. Owners are process indices of the pool."""

    # --- pool processes -----------------------------------------------------------------------------------------

    async def join(self, name: str, node_id: str, feeder: int | None = None) -> Joined:
        """Join the pool under a name. A process that had the name before counts as lost. feeder: a feeder's number."""
        ...

    async def publish(self, export: SegmentExport) -> None:
        """Export a segment, and export it again after it grew."""
        ...

    async def exports(self) -> tuple[SegmentExport, ...]:
        """Return the exports of all living processes."""
        ...

    async def clock(self) -> ClockReading:
        """Return this moment on the coordinator's clocks, at once."""
        ...

    async def process_lost(self, name: str, for_good: bool = False) -> None:
        """Report that a process died: what it held is produced again. for_good: no new process takes its place."""
        ...

    # --- feeders and encoders -----------------------------------------------------------------------------------

    async def feed(self, owner: int, report: FeedReport) -> FeedOrder:
        """Report what a feeder did, then wait for work."""
        ...

    async def wait_for_room(self, owner: int) -> RoomOrder:
        """Wait, with a full segment, for memory or for the end of the run."""
        ...

    async def lease(self, owner: int, encoder: str, free_nbytes: int) -> LeaseOrder:
        """Wait for a batch to encode. free_nbytes: room in the segment now, before the order frees more."""
        ...

    async def hand_in(self, owner: int, report: EncoderReport) -> HandInReply:
        """Report what an encoder finished."""
        ...

    # --- backbone: the leader of each replica asks for all its ranks --------------------------------------------

    async def begin(self, unit: int) -> bool:
        """Ask to run the first unit; False: stop. All replicas get the same answer for the same unit."""
        ...

    async def next_plan(self, unit: int, dp_rank: int) -> PlanReply:
        """Wait for a unit's plan, as a replica needs it."""
        ...

    async def locate(
        self, unit: int, slot: int | None, dp_rank: int, read: tuple[int, ...] = (), limit: int = 1
    ) -> LocateReply:
        """Wait until a microbatch is READY. Returns it, and the READY ones that follow it directly, at most ``limit``.

        slot: the microbatch's slot; None (``arrival`` order): any that the replica does not know yet.
        read: slots of the unit that all ranks of the replica have read since the last question; they are released.
        """
        ...

    async def release(self, unit: int, slots: tuple[int, ...], dp_rank: int, ends: bool = False) -> PlanReply:
        """Report microbatches that all ranks of a replica have read: their bytes in the pool are no longer needed.

        ends: the replica has read the whole unit. The answer then has the next unit's plan, if there is one already.
        """
        ...

    async def reject(self, dp_rank: int, rejections: tuple[Rejection, ...]) -> None:
        """Report samples of located microbatches with an image that cannot be decoded; the replica leaves them out.

        Ask it before the microbatches are reported as read.
        """
        ...

    async def finish(self, reports: tuple[RankReport, ...], spans: tuple[Span, ...]) -> bool:
        """Report a unit that a replica finished, and ask to run the next one, as ``begin``.

        reports: of all its ranks.
        """
        ...

    async def checkpoint_written(self, step: int, directory: str, duration_s: float = 0.0) -> None:
        """Report that all ranks have written their shares of a checkpoint, and what it took; rank 0 reports it."""
        ...

    async def checkpoint_failed(self, step: int, reason: str) -> None:
        """Report that a checkpoint could not be written; rank 0 reports it for all."""
        ...

    async def snapshot_kept(self, step: int) -> None:
        """Report that the nodes of all ranks keep a snapshot of the state after a step; rank 0 reports it."""
        ...

    async def describe_wait(self, unit: int, slot: int | None, dp_rank: int) -> str:
        """Return who waits for what, as text for a message."""
        ...

    # --- driver -------------------------------------------------------------------------------------------------

    async def events(self) -> tuple[Event, ...]:
        """Wait for events, and return them."""
        ...

    async def end_events(self) -> None:
        """Answer the waiting ``events`` at once, and all later ones: everything was reported."""
        ...

    async def flush_events(self, hold: bool = False) -> None:
        """Answer the waiting ``events`` at once; if none waits, the next one.

        hold: after this answer ``events`` waits until the run has gone back (``rewind``).
        """
        ...

    async def rewind(self, settings: FlowSettings, gone: tuple[str, ...]) -> None:
        """Go back to where ``settings`` start: the backbone ended, and other ranks of it take its place.

        Producers keep their memory, free what they hold of later positions, and make these again. Questions of the
        ended ranks are refused from now on. gone: names of these ranks.
        """
        ...

    async def trace(self, num_steps: int) -> TraceSteps:
        """Trace so many more steps; returns which. Actors that record only when asked must be asked too."""
        ...

    async def request_stop(self) -> None:
        """End the run after the running step and the evaluation that may follow it."""
        ...
