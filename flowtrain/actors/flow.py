"""The run's bookkeeping as a plain class: what may be sized, encoded, run and released now (docs/architecture.md).

Nothing here waits, does I/O or knows of Ray: every method answers at once; the coordinator's shell does the waiting.
"""

from __future__ import annotations

from flowtrain.actors.agenda import Agenda, Planned
from flowtrain.actors.event_log import EventLog
from flowtrain.actors.membership import Membership
from flowtrain.actors.order import SamplerState
from flowtrain.actors.readers import Readers
from flowtrain.actors.turns import Turns
from flowtrain.errors import StaleLeaseError
from flowtrain.mempool.directory import Directory
from flowtrain.scheduler.refit import CostRefitter
from flowtrain.types.events import Event
from flowtrain.types.memory import Extent, SegmentExport, Tier
from flowtrain.types.messages import (
    EncoderReport,
    FeedOrder,
    FeedReport,
    Joined,
    LeaseOrder,
    MicrobatchLocation,
    RankReport,
    Span,
)
from flowtrain.types.plan import StepPlan, Unit, UnitKind
from flowtrain.types.samples import Rejection

ASK_AGAIN = LeaseOrder(None, (), blocked=True, stop=False)
"""For an encoder that waits: say anew what room there is."""


class Flow:
    """Agenda, directory and membership of one run, joined.

    sampler_state: before the first unit that is sized. replica_size: ranks of each of the ``dp_size`` replicas, which
    are numbered replica by replica.
    """

    def __init__(
        self,
        *,
        agenda: Agenda,
        sampler_state: SamplerState,
        dp_size: int,
        replica_size: int = 1,
        directory: Directory,
        membership: Membership,
        trace_steps: int,
        refitter: CostRefitter | None = None,
        num_rejected: int = 0,
        num_seen: int = 0,
    ) -> None:
        self._agenda = agenda
        self._sampler_state = sampler_state
        self._directory = directory
        self._membership = membership
        self._turns = Turns(agenda)
        self._log = EventLog(
            num_ranks=dp_size * replica_size,
            refitter=refitter or CostRefitter(),
            last_traced_step=agenda.last_step + trace_steps,
            num_rejected=num_rejected,
            num_seen=num_seen,
        )
        self._readers = Readers(directory, replica_size)
        self._grown: set[int] = set()  # encoders with more room than when they last asked for a lease

    # --- membership ---------------------------------------------------------------------------------------------

    def join(self, name: str, node_id: str) -> Joined:
        """A pool process starts (or starts again, which ends the process that had its name)."""
        index, previous = self._membership.join(name, node_id)
        if previous is not None:
            self.owner_lost(previous)
        upcoming = self._agenda.upcoming
        return Joined(index, self._sampler_state, upcoming.index if upcoming is not None else -1)

    def publish(self, export: SegmentExport) -> None:
        """A process exports its segment."""
        self._membership.publish(export)

    def exports(self) -> tuple[SegmentExport, ...]:
        """What the living processes export."""
        return self._membership.exports()

    def owner_lost(self, owner: int, for_good: bool = False) -> None:
        """A pool process died: what only it held is to be made again. Harmless when said twice.

        for_good: no other takes its place, and the memory of the others has to do.
        """
        self._membership.withdraw(owner)
        self._log.forget(owner)
        self._grown.discard(owner)
        self._directory.owner_lost(owner, for_good)

    def name_lost(self, name: str, for_good: bool = False) -> None:
        """As ``owner_lost``, for the process that has this name now."""
        index = self._membership.index_of(name)
        if index is not None:
            self.owner_lost(index, for_good)

    # --- feeder -------------------------------------------------------------------------------------------------

    def feed(self, owner: int, report: FeedReport) -> tuple[Extent, ...]:
        """Take in a sized unit; take in text parts that were made again.

        Returns the extents of those that nobody needs any more, to free. What a lost process had sent is left aside:
        its successor does the same again.
        """
        if not self._membership.is_living(owner):
            return ()
        self._log.stats(owner, report.stats)
        refused: list[Extent] = []
        for ready in report.remade:
            try:
                self._directory.text_ready(owner, ready)
            except StaleLeaseError:  # it was rejected or released meanwhile
                refused.extend(ready.extents)
        self.record(report.spans)
        if report.unit is not None:
            self._take_sized(owner, report.unit, report)
        return tuple(refused)

    def _take_sized(self, owner: int, unit: Unit, report: FeedReport) -> None:
        upcoming = self._agenda.upcoming
        assert unit == upcoming and report.sampler_state is not None, f"unit {unit} was reported, not {upcoming}"
        self._sampler_state = report.sampler_state
        for sample, text in zip(report.sized, report.texts, strict=True):
            self._directory.add_sized(sample, owner, text)
        if unit.kind is UnitKind.TRAIN:
            self._log.seen(len(report.sized) + len(report.rejections))
        self._reject(report.rejections)
        self._note_plan(self._agenda.add_sized(unit, report.sized, report.sampler_state))

    def release_order(self, owner: int) -> FeedOrder | None:
        """As ``feed_order`` for a feeder that has no room for what it is at: what it may free, or stop; or None."""
        if not self.stopped and not self._directory.released_nbytes(owner):
            return None
        return FeedOrder(None, (), self._directory.take_released(owner), self.stopped)

    def feed_order(self, owner: int) -> FeedOrder | None:
        """What the feeder can do now, or None if it has to wait: size a unit, or make text again, never both.

        What it may free comes with that; until then it needs no room.
        """
        if self.stopped:
            return FeedOrder(None, (), self._directory.take_released(owner), stop=True)
        remake = self._directory.lost_text(owner)
        unit = self._agenda.upcoming
        # Text that was lost is reported before more is put: a segment full of unreported parts is never released.
        if unit is not None and (remake or not self._turns.may_size(unit)):
            unit = None
        if unit is None and not remake:
            return None
        done = unit.positions if unit is not None else ()
        consumed = tuple(position for position in done if self._directory.is_consumed(position))
        return FeedOrder(unit, remake, self._directory.take_released(owner), stop=False, consumed=consumed)

    def _note_plan(self, planned: Planned | None) -> None:
        if planned is not None:
            args: dict[str, int | float | str] = {"step": planned.plan.unit.step}
            self.record((Span("coordinator", "pack", planned.started_s, planned.finished_s, args),))

    # --- encoders -----------------------------------------------------------------------------------------------

    def hand_in(self, owner: int, report: EncoderReport) -> tuple[Extent, ...]:
        """Take in what an encoder finished; returns the extents of parts whose lease is no longer its own, to free."""
        if self._membership.is_living(owner):
            self._log.stats(owner, report.stats)
        self._log.blocked(report.blocked_s)
        self.record(report.spans)
        self._reject(report.rejections)
        refused: list[Extent] = []
        has_grown = bool(report.rejections)  # DRAM that was promised, and did not come to be used, is free
        for ready in report.ready:
            try:
                has_grown |= self._directory.ready(owner, ready) is Tier.HBM
            except StaleLeaseError:
                refused.extend(ready.extents)
        if (has_grown or refused) and self._membership.is_living(owner):
            self._grown.add(owner)
        return tuple(refused)

    def lease_order(self, owner: int, encoder: str, free_nbytes: int, is_fresh: bool = True) -> LeaseOrder | None:
        """What an encoder can do now, or None if it has to wait (for memory, for the window, for sizes).

        A lease counts on the memory that the order gives back with it. free_nbytes: what its segment could take when
        it asked. is_fresh: that is now; else nothing is evicted on that account, but the encoder told to ask again.
        """
        if self.stopped:
            return LeaseOrder(None, self._directory.take_released(owner), blocked=False, stop=True)
        if is_fresh:
            self._grown.discard(owner)
        self._directory.expire_leases()
        lease = self._directory.lease(owner, encoder, self._room(owner, free_nbytes))
        if lease is None and not is_fresh:
            is_stale = owner in self._grown or self._directory.may_evict(owner, encoder)
            return ASK_AGAIN if is_stale else None
        if lease is None and self._directory.make_room(owner, encoder, self._room(owner, free_nbytes)):
            lease = self._directory.lease(owner, encoder, self._room(owner, free_nbytes))
        released = self._directory.take_released(owner) if lease is not None else ()
        return LeaseOrder(lease, released, blocked=False, stop=False) if lease is not None else None

    def _room(self, owner: int, free_nbytes: int) -> int:
        return free_nbytes + self._directory.released_nbytes(owner)

    def may_lease_more(self, owner: int) -> bool:
        """Whether a lease may wait for what an encoder handed in: its own room grew, or others may evict now."""
        return owner in self._grown or self._directory.has_lost_memory

    # --- backbone -----------------------------------------------------------------------------------------------

    def plan_of(self, unit_index: int) -> StepPlan | None:
        """The plan of a unit, or None while it cannot be planned; made now where the order waits for being asked."""
        if self._agenda.is_unplanned(unit_index):
            self._note_plan(self._agenda.plan(unit_index))
        return self._agenda.plan_of(unit_index)

    def is_past_end(self, unit_index: int) -> bool:
        """Whether a unit that no rank began will never come: the run was stopped, or its units are used up."""
        return self._turns.is_past_end(unit_index)

    def begin(self, unit_index: int) -> bool:
        """A rank is about to run a unit; False means stop. All ranks get the same answer for the same unit."""
        return self._turns.begin(unit_index)

    def locate(self, unit_index: int, slot: int | None, rank: int) -> MicrobatchLocation | None:
        """Where a rank's microbatch lies, or None while it has to wait; slot None (``arrival`` order): its next one.

        All ranks of a replica get the same ones in the same order, see ``Readers``.
        """
        plan = self._agenda.plan_of(unit_index)
        return self._readers.locate(plan, slot, rank) if plan is not None else None

    def release(self, unit_index: int, slot: int, rank: int) -> bool:
        """A rank has read a microbatch: its bytes may be used again when all have that need it.

        Returns whether now the whole unit is read, for which ranks that are ahead may wait.
        """
        return self._readers.release(unit_index, slot, rank)

    def finish(self, report: RankReport, spans: tuple[Span, ...]) -> bool:
        """A rank finished a unit; True once all have, which consumes its positions and moves the window."""
        self.record(spans)
        if not self._log.finished(report):
            return False
        rows = self._directory.consume(report.unit)
        planned, sampler_state = self._agenda.finish(report.unit)
        self._readers.end_unit(report.unit)
        hbm_nbytes = self._directory.occupancy()[Tier.HBM]
        self._log.unit_done(planned, rows, sampler_state, self._directory.num_produced, hbm_nbytes)
        return True

    def checkpoint_written(self, step: int, rank: int, directory: str) -> bool:
        """A rank wrote its share; True once all have."""
        return self._log.checkpoint_written(step, rank, directory)

    # --- driver -------------------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """End the run after the step that is running and the evaluation that may follow it."""
        self._turns.request_stop()

    @property
    def stopped(self) -> bool:
        """Whether the producers have nothing left to do: the backbone stopped, or all units are done."""
        return self._turns.are_over

    @property
    def has_news(self) -> bool:
        """Whether something happened that the driver waits for; spans for the trace come with it."""
        return self._log.has_news

    def take_events(self) -> tuple[Event, ...]:
        """Hand over what happened since the last call."""
        return self._log.take()

    def describe_wait(self, unit_index: int, slot: int | None, rank: int) -> str:
        """Who waits for what, for the message of a stalled wait."""
        plan = self._agenda.plan_of(unit_index)
        if plan is None:
            return self._agenda.describe_wait(unit_index)
        return self._readers.describe_wait(plan, slot, rank)

    def record(self, spans: tuple[Span, ...]) -> None:
        """Keep spans for the trace until its last step is done."""
        self._log.spans(spans, self._agenda.last_step)

    def _reject(self, rejections: tuple[Rejection, ...]) -> None:
        # A batch that is encoded again meets the same bad image again; it counts once.
        self._log.rejected([rejection for rejection in rejections if self._directory.reject(rejection)])
