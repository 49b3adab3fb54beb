"""The run's bookkeeping as a plain class: what may be sized, encoded, run and released now (docs/architecture.md).

Nothing here waits, does I/O or uses Ray: every method answers at once. The coordinator does the waiting. The simulator
drives the same class in virtual time (`simulator/flow_run.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

from flowtrain.errors import StaleLeaseError
from flowtrain.flow.eviction import make_room, may_evict
from flowtrain.flow.feeding import Feeding
from flowtrain.flow.flow_trace import FlowTrace
from flowtrain.flow.members import Members
from flowtrain.flow.microbatches import Microbatches
from flowtrain.flow.parts import Parts
from flowtrain.flow.report import EventLog
from flowtrain.flow.steps import PlannedUnit, Search, Steps
from flowtrain.types.events import LedgerRow
from flowtrain.types.memory import Extent, SegmentUse, Tier
from flowtrain.types.messages import (
    EncoderReport,
    FeedOrder,
    FeedReport,
    Joined,
    LeaseOrder,
    LocateReply,
    PartReady,
    PlanReply,
    RankReport,
    RoomOrder,
    Span,
)
from flowtrain.types.plan import EncodeBatch, StepPlan, Unit, UnitKind
from flowtrain.types.samples import Rejection, SamplerState

ASK_AGAIN = LeaseOrder(None, (), stop=False)
"""For an encoder that waits: it must ask again, with the room that it has now."""


class Flow:
    """Owns the bookkeeping of one run. The methods here concern several of its members at once.

    Callers use a single member directly.

    members: which processes take part.
    parts: positions and their memory.
    microbatches: what replicas read.
    steps: units.
    log: events for the driver.
    trace: what the trace gets.
    feeding: what each feeder has sized.
    in_turn: a unit is encoded only when the backbone has read all units before it (``pool.exchange: point_to_point``).
    """

    def __init__(
        self,
        *,
        members: Members,
        parts: Parts,
        microbatches: Microbatches,
        steps: Steps,
        log: EventLog,
        feeding: Feeding,
        in_turn: bool = False,
    ) -> None:
        self.members = members
        self.parts = parts
        self.microbatches = microbatches
        self.steps = steps
        self.log = log
        self.feeding = feeding
        self.trace = FlowTrace(log, members, steps, parts.holdings)
        self._in_turn = in_turn
        parts.leases.on_done = self._encoded
        parts.leases.name_of = members.name_of
        self._grown: set[int] = set()  # encoders that have more room than at their last question for a lease
        self._outdated: set[int] = set()  # feeders that still size what an earlier flow has asked for

    def take_over(self, earlier: Flow) -> None:
        """Go on with the living processes of an earlier flow, which share its ``members``; call it before any other.

        What they hold is theirs to free. Feeders learn with their next order where they size from; what producers
        still report of the earlier flow is refused.
        """
        assert self.members is earlier.members, "both flows have the same processes"
        self.parts.take_over(earlier.parts)
        self.log.take_over(earlier.log)
        self.trace.take_over(earlier.trace)
        self._outdated = {each for each in self.feeding.take_over(earlier.feeding) if self.members.is_living(each)}
        if earlier.steps.is_stopping:
            self.steps.request_stop()

    # --- processes ----------------------------------------------------------------------------------------------

    def join(self, name: str, node_id: str, feeder: int | None = None) -> Joined:
        """Let a pool process join. If another process had its name before, that process counts as lost.

        feeder: its number among the feeders; None for any other process.
        """
        index, previous = self.members.join(name, node_id)
        if previous is not None:
            self._owner_lost(previous, for_good=False)
        self.trace.joined(name)
        if feeder is None:
            return Joined(index)
        self.feeding.join(index, feeder)
        self.parts.leases.add_feeder(index, feeder)
        return Joined(index, self.feeding.state_of(index))

    def process_lost(self, name: str, for_good: bool = False) -> None:
        """Have everything that only a dead process held produced again. May be called twice.

        for_good: no new process takes its place, so the memory of the others must suffice.
        """
        index = self.members.index_of(name)
        if index is not None:
            self._owner_lost(index, for_good)
        if not for_good:
            self.trace.missing(name)

    def _owner_lost(self, owner: int, for_good: bool) -> None:
        if self.members.is_living(owner):
            self.trace.lost(owner, for_good)
        self.members.withdraw(owner)
        self.log.forget(owner, self.members.name_of(owner))
        self._note_idle(owner)
        self._grown.discard(owner)
        self._outdated.discard(owner)
        self.parts.owner_lost(owner, for_good)

    # --- feeder -------------------------------------------------------------------------------------------------

    def feed(self, owner: int, report: FeedReport) -> tuple[Extent, ...]:
        """Take in a feeder's share of a unit, and parts that it produced again.

        Returns extents of parts that are no longer needed, for the feeder to free. Reports of a lost feeder are
        ignored: its successor does the same work again.
        """
        if not self.members.is_living(owner):
            return ()
        self.log.stats(owner, report.stats)
        self.log.retried(report.num_retries)
        self.trace.occupied(owner)
        if owner in self._outdated:
            return _extents_of(*report.texts, *report.images, *report.remade)
        refused: list[Extent] = []
        for ready in report.remade:
            try:
                self.parts.remade(owner, ready)
            except StaleLeaseError:  # meanwhile it was rejected or released
                refused.extend(ready.extents)
        self.trace.record(report.spans)
        if report.unit is not None:
            self._take_sized(owner, report.unit, report)
        return tuple(refused)

    def _take_sized(self, owner: int, unit: Unit, report: FeedReport) -> None:
        sized = self.feeding.report(owner, report)
        self.parts.add_sized(report.sized, owner, report.texts, report.images)
        if sized is None:
            return
        # Counted by whole units: the share of rejected samples must not depend on which feeder is ahead.
        if unit.kind is UnitKind.TRAIN:
            self.log.seen(len(sized.samples) + len(sized.rejections))
        self._reject(sized.rejections)
        self._note_plans(self.steps.add_sized(unit, sized.samples, sized.sampler_state))

    def room_order(self, owner: int) -> RoomOrder | None:
        """Return what a feeder without room may free, or stop; None while it must wait."""
        if not self.steps.are_over and not self.parts.holdings.released_nbytes(owner):
            return None
        return RoomOrder(self.parts.holdings.take_released(owner), self.steps.are_over)

    def feed_order(self, owner: int) -> FeedOrder | None:
        """Return what a feeder does now: size its share of a unit, or produce parts again, never both. None: it waits.

        The order also has the extents that it may free; until then it needs no room.
        """
        if self.steps.are_over:
            return FeedOrder(None, (), self.parts.holdings.take_released(owner), stop=True)
        if owner in self._outdated:
            self._outdated.remove(owner)
            state = self.feeding.state_of(owner)
            return FeedOrder(None, (), self.parts.holdings.take_released(owner), stop=False, starts_at=state)
        remake = self.parts.leases.grant_lost_parts(owner)
        unit = self.feeding.next_unit(owner)
        # Lost parts are reported before new ones are put: a segment full of unreported parts is never released.
        if unit is not None and (remake or not self.steps.may_size(unit)):
            unit = None
        if unit is None and not remake:
            return None
        done = unit.positions if unit is not None else ()
        consumed = self.parts.consumed_among(done)
        return FeedOrder(unit, remake, self.parts.holdings.take_released(owner), stop=False, consumed=consumed)

    # --- encoders -----------------------------------------------------------------------------------------------

    def hand_in(self, owner: int, report: EncoderReport) -> tuple[Extent, ...]:
        """Take in what an encoder finished. Returns the extents of parts whose lease it no longer holds, to free."""
        refused = self._take_in(owner, report)
        self._note_idle(owner)
        return refused

    def _take_in(self, owner: int, report: EncoderReport) -> tuple[Extent, ...]:
        if self.members.is_living(owner):
            self.log.stats(owner, report.stats)
            self.trace.occupied(owner)
        self.log.read(report.read_by_transport)
        self.trace.record(report.spans)
        self.parts.leases.handed_in(owner, report.lease_id)
        if self.parts.leases.is_earlier(report.lease_id):
            self._grown.add(owner)
            return _extents_of(*report.ready)
        self._reject(report.rejections)
        refused: list[Extent] = []
        has_grown = bool(report.rejections)  # DRAM that was promised to rejected samples is free
        if report.returned is not None:
            self.parts.give_back(owner, report.returned)
            self.log.retried(1)
            has_grown = True
        for ready in report.ready:
            try:
                has_grown |= self.parts.ready(owner, ready) is Tier.HBM
            except StaleLeaseError:
                refused.extend(ready.extents)
        self.trace.ahead()
        if (has_grown or refused) and self.members.is_living(owner):
            self._grown.add(owner)
        return tuple(refused)

    def _encoded(self, owner: int, batch: EncodeBatch, seconds: float) -> None:
        if self.members.is_living(owner):
            self.log.encoded(self.members.name_of(owner), seconds, batch.num_patches)

    def lease_order(self, owner: int, encoder: str, free_nbytes: int, is_fresh: bool = True) -> LeaseOrder | None:
        """Return what an encoder does now, or None if it must wait (for memory, for the lookahead, for sizes).

        A lease counts on the memory that the same order gives back.

        free_nbytes: room in its segment when it asked.
        is_fresh: it asked just now. Otherwise nothing is evicted by that old number; the encoder asks again instead.
        """
        order = self._lease_order(owner, encoder, free_nbytes, is_fresh)
        self._note_idle(owner)
        return order

    def _note_idle(self, owner: int) -> None:
        if self.log.idle is not None:
            is_idle = self.members.is_living(owner) and self.parts.leases.is_idle(owner)
            self.log.idle.note(owner, is_idle, self.log.now_s)

    def _lease_order(self, owner: int, encoder: str, free_nbytes: int, is_fresh: bool) -> LeaseOrder | None:
        parts = self.parts
        if self.steps.are_over:
            return LeaseOrder(None, parts.holdings.take_released(owner), stop=True)
        if is_fresh:
            self._grown.discard(owner)
        parts.expire_leases()
        first = parts.leases.first_in_line(encoder) if self._in_turn else None
        if first is not None and not self.steps.is_turn_to_encode(first.batch.unit):
            return None
        lease = parts.leases.grant(owner, encoder, free_nbytes + parts.holdings.released_nbytes(owner))
        if lease is None and not is_fresh:
            return ASK_AGAIN if owner in self._grown or may_evict(parts, owner, encoder) else None
        room = free_nbytes + parts.holdings.released_nbytes(owner)
        if lease is None and make_room(parts, owner, encoder, room, self.microbatches.kept_unit):
            lease = parts.leases.grant(owner, encoder, free_nbytes + parts.holdings.released_nbytes(owner))
        return LeaseOrder(lease, parts.holdings.take_released(owner), stop=False) if lease is not None else None

    def may_lease_more(self, owner: int) -> bool:
        """Whether an encoder's report may allow a lease that waits: its own room grew, or others may evict now."""
        return owner in self._grown or self.parts.has_lost_memory

    # --- backbone -----------------------------------------------------------------------------------------------

    def plan_of(self, unit_index: int) -> StepPlan | None:
        """Return the plan of a unit, or None while it cannot be planned. Steps by arrival are planned here."""
        self._note_plans(self.steps.plan_now(unit_index))
        return self.steps.plan_of(unit_index)

    def search_ended(self, search: Search) -> None:
        """Take in the plan of a search; one that has not ended is given up."""
        if not search.future.done():
            self.steps.give_up(search)
        self._note_plans(self.steps.take_plans())

    def plan_reply(self, unit_index: int, dp_rank: int) -> PlanReply | None:
        """Return a unit's plan as a replica needs it, or that the unit will not come; None while it must wait."""
        plan = self.plan_of(unit_index)
        if plan is None and not self.steps.is_past_end(unit_index):
            return None
        return PlanReply(plan.for_replica(dp_rank) if plan is not None else None, is_past_end=plan is None)

    def locate_reply(self, unit_index: int, slot: int | None, dp_rank: int, limit: int = 1) -> LocateReply | None:
        """Return where microbatches lie, as ``Microbatches.locate``; or that their unit will not come; None: wait."""
        if self.steps.is_past_end(unit_index):
            return LocateReply((), is_past_end=True)
        found = self.microbatches.locate(unit_index, slot, dp_rank, limit)
        return LocateReply(found, is_past_end=False) if found else None

    def reject(self, dp_rank: int, rejections: Iterable[Rejection]) -> None:
        """Quarantine samples that a replica has found bad while it reads them, as ``Microbatches.reject``."""
        self.log.rejected([each for each in rejections if self.microbatches.reject(dp_rank, each)])

    def finish(self, reports: tuple[RankReport, ...], spans: tuple[Span, ...]) -> bool:
        """Note that a replica finished a unit. The last one consumes its positions and moves the window: then True.

        reports: of the replica's ranks.
        """
        self.trace.record(spans)
        if not self.log.finished(reports):
            return False
        rows, planned, sampler_state = self.consume(reports[0].unit)
        lookahead = self.microbatches.num_ready_units
        self.log.unit_done(planned, rows, sampler_state, self.parts.num_produced, lookahead, self._segments())
        return True

    def consume(self, unit: int) -> tuple[tuple[LedgerRow, ...], PlannedUnit, SamplerState]:
        """Consume the positions of a unit that all replicas have finished, and move the window.

        Returns their ledger rows, the unit with its plan, and the state from which a run continues after it.
        """
        rows = self.parts.consume(self.microbatches.end(unit))
        planned, sampler_state = self.steps.finish(unit)
        self.trace.ahead()
        return rows, planned, sampler_state

    def describe_wait(self, unit_index: int, slot: int | None, dp_rank: int) -> str:
        """Return who waits for what, for the message of a stalled wait."""
        if self.steps.plan_of(unit_index) is None:
            return self.steps.describe_wait(unit_index)
        return self.microbatches.describe_wait(unit_index, slot, dp_rank)

    # --- the driver's view --------------------------------------------------------------------------------------

    def _segments(self) -> tuple[SegmentUse, ...]:
        """Return the use of all segments: in DRAM as their owners reported it, in HBM by the parts that lie there."""
        name_of, hbm_nbytes_of = self.members.name_of, self.parts.holdings.hbm_nbytes_of
        dram = [
            SegmentUse(name_of(owner), Tier.DRAM, stats.used_nbytes, stats.bound_nbytes)
            for owner, stats in self.log.segments.items()
        ]
        hbm = [
            SegmentUse(name_of(each.process_index), Tier.HBM, hbm_nbytes_of(each.process_index), each.bound_nbytes)
            for each in self.members.exports()
            if each.tier is Tier.HBM
        ]
        return (*dram, *hbm)

    def _reject(self, rejections: Iterable[Rejection]) -> None:
        # A batch that is encoded again has the same bad image again; it counts once.
        self.log.rejected([rejection for rejection in rejections if self.parts.reject(rejection)])

    def _note_plans(self, plans: Iterable[PlannedUnit]) -> None:
        for planned in plans:
            self.trace.planned(planned)
            self.trace.ahead()


def _extents_of(*parts: PartReady) -> tuple[Extent, ...]:
    return tuple([extent for part in parts for extent in part.extents])
