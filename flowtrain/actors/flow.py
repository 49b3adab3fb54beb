"""The run's bookkeeping as a plain class: what may be sized, encoded, run and released now (docs/architecture.md).

Nothing here waits, does I/O or knows of Ray: every method answers at once; the coordinator's shell does the waiting.
"""

from __future__ import annotations

from collections import deque

from flowtrain.actors.agenda import Agenda, Planned
from flowtrain.actors.membership import Membership
from flowtrain.actors.order import SamplerState
from flowtrain.actors.readers import Readers, of_replicas
from flowtrain.errors import StaleLeaseError
from flowtrain.mempool.directory import Directory
from flowtrain.scheduler.refit import CostRefitter
from flowtrain.scheduler.summary import imbalance, packing_fill
from flowtrain.types import (
    EVAL_POSITION_BASE,
    CheckpointWritten,
    EncoderReport,
    Event,
    Extent,
    FeedOrder,
    FeedReport,
    Joined,
    LeaseOrder,
    MicrobatchLocation,
    PoolStats,
    RankReport,
    Rejected,
    Rejection,
    SampleRef,
    SegmentExport,
    Span,
    SpansRecorded,
    StepPlan,
    Unit,
    UnitDone,
    UnitKind,
)


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
        self._num_ranks = dp_size * replica_size
        self._directory = directory
        self._membership = membership
        self._last_traced_step = agenda.last_step + trace_steps
        self._refitter = refitter or CostRefitter()

        self._reports: dict[int, list[RankReport]] = {}
        self._readers = Readers(directory, replica_size)
        self._begun = -1
        self._stop_requested = False
        self._stop_at: int | None = None
        self._stats: dict[int, PoolStats] = {}
        self._blocked_s = 0.0
        self._produced_mark = 0
        self._num_rejected = num_rejected
        self._num_seen = num_seen
        self._checkpoints: dict[int, set[int]] = {}
        self.events: deque[Event] = deque()

    # --- membership ---------------------------------------------------------------------------------------------

    def join(self, name: str, node_id: str) -> Joined:
        """A pool process starts (or starts again, which ends the process that had its name)."""
        index, previous = self._membership.join(name, node_id)
        if previous is not None:
            self.owner_lost(previous)
        upcoming = self._agenda.upcoming
        next_unit = upcoming.index if upcoming is not None else -1
        return Joined(index, self._sampler_state, next_unit)

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
        self._stats.pop(owner, None)
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
        if report.stats is not None:
            self._stats[owner] = report.stats
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
            self._num_seen += len(report.sized) + len(report.rejections)
        self._reject(report.rejections)
        self._note_plan(self._agenda.add_sized(unit, report.sized, report.sampler_state))

    def release_order(self, owner: int) -> FeedOrder | None:
        """As ``feed_order`` for a feeder that has no room for what it is at: what it may free, or stop; or None."""
        released = self._directory.take_released(owner)
        return FeedOrder(None, (), released, self.stopped) if released or self.stopped else None

    def feed_order(self, owner: int) -> FeedOrder | None:
        """What the feeder can do now, or None if it has to wait: size a unit, or make text again, never both."""
        released = self._directory.take_released(owner)
        remake = self._directory.lost_text(owner)
        unit = self._agenda.upcoming
        # Text that was lost is reported before more is put: a segment full of unreported parts is never released.
        if unit is not None and (remake or not self._may_size(unit)):
            unit = None
        if self.stopped:
            return FeedOrder(None, (), released, stop=True)
        if unit is None:
            return FeedOrder(None, remake, released, stop=False) if remake or released else None
        consumed = tuple(position for position in unit.positions if self._directory.is_consumed(position))
        return FeedOrder(unit, (), released, stop=False, consumed=consumed)

    def _may_size(self, unit: Unit) -> bool:
        """A stopping run sizes only what a rank already began; else the window decides."""
        return unit.index <= self._begun if self._stop_requested else self._agenda.is_near(unit)

    def _note_plan(self, planned: Planned | None) -> None:
        if planned is not None:
            started, finished, step = planned.started_s, planned.finished_s, planned.plan.unit.step
            self.record((Span("coordinator", "pack", started, finished, {"step": step}),))

    # --- encoders -----------------------------------------------------------------------------------------------

    def hand_in(self, owner: int, report: EncoderReport) -> tuple[Extent, ...]:
        """Take in what an encoder finished; returns the extents of parts whose lease is no longer its own, to free."""
        if report.stats is not None and self._membership.is_living(owner):
            self._stats[owner] = report.stats
        self._blocked_s += report.blocked_s
        self.record(report.spans)
        self._reject(report.rejections)
        refused: list[Extent] = []
        for ready in report.ready:
            try:
                self._directory.ready(owner, ready)
            except StaleLeaseError:
                refused.extend(ready.extents)
        return tuple(refused)

    def lease_order(self, owner: int, encoder: str, free_nbytes: int) -> LeaseOrder | None:
        """What an encoder can do now, or None if it has to wait (for memory, for the window, for sizes)."""
        released = self._directory.take_released(owner)
        if self.stopped:
            return LeaseOrder(None, released, blocked=False, stop=True)
        self._directory.expire_leases()
        lease = self._directory.lease(owner, encoder, free_nbytes)
        if lease is None and not released:
            if not self._directory.make_room(owner, encoder, free_nbytes):
                return None
            released = self._directory.take_released(owner)
        return LeaseOrder(lease, released, blocked=lease is None, stop=False)

    # --- backbone -----------------------------------------------------------------------------------------------

    def plan_of(self, unit_index: int) -> StepPlan | None:
        """The plan of a unit, or None while it cannot be planned; made now where the order waits for being asked."""
        if self._agenda.is_unplanned(unit_index):
            self._note_plan(self._agenda.plan(unit_index))
        return self._agenda.plan_of(unit_index)

    def is_past_end(self, unit_index: int) -> bool:
        """Whether a unit that no rank began will never come: the run was stopped, or its units are used up."""
        if self._stop_at is not None:
            return unit_index >= self._stop_at
        return self._agenda.upcoming is None and unit_index not in self._agenda.unfinished

    def begin(self, unit_index: int) -> bool:
        """A rank is about to run a unit; False means stop. All ranks get the same answer for the same unit."""
        if unit_index <= self._begun:
            return True
        # A round of evaluation belongs to the step before it: a resumed run starts behind both.
        if self._stop_requested and self._stop_at is None and self._kind_of(unit_index) is not UnitKind.EVAL:
            self._stop_at = unit_index
        if self.is_past_end(unit_index):
            return False
        self._begun = unit_index
        return True

    def _kind_of(self, unit_index: int) -> UnitKind | None:
        """Kind of the unit that is next to begin; None past the end."""
        unit = self._agenda.unfinished.get(unit_index) or self._agenda.upcoming
        return unit.kind if unit is not None else None

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
        reports = self._reports.setdefault(report.unit, [])
        reports.append(report)
        if len(reports) < self._num_ranks:
            return False
        self._finish_unit(report.unit)
        return True

    def _finish_unit(self, unit_index: int) -> None:
        rows = self._directory.consume(unit_index)
        planned, sampler_state = self._agenda.finish(unit_index)
        plan = planned.plan
        reports = of_replicas(self._reports.pop(unit_index))
        self._readers.end_unit(unit_index)
        produced = self._directory.num_produced
        self.events.append(
            UnitDone(
                unit=plan.unit,
                reports=reports,
                plan_digest=plan.digest(),
                plan_time_s=planned.finished_s - planned.started_s,
                num_microbatches=plan.num_microbatches,
                packing_fill=packing_fill(plan),
                dp_imbalance=imbalance(plan),
                flops=planned.flops.sum(without={row.position for row in rows if row.state == "rejected"}),
                blocked_s=self._blocked_s,
                produced_samples=produced - self._produced_mark,
                num_rejected=self._num_rejected,
                pool_dram_nbytes=sum(stats.used_nbytes for stats in self._stats.values()),
                pool_dram_bound_nbytes=sum(stats.bound_nbytes for stats in self._stats.values()),
                ledger=rows,
                sampler_state=sampler_state,
            )
        )
        self.events.extend(self._refitter.take(plan, reports))
        self._produced_mark = produced
        self._blocked_s = 0.0

    def checkpoint_written(self, step: int, rank: int, directory: str) -> bool:
        """A rank wrote its share; True once all have."""
        ranks = self._checkpoints.setdefault(step, set())
        ranks.add(rank)
        if len(ranks) < self._num_ranks:
            return False
        del self._checkpoints[step]
        self.events.extend(self._refitter.fitted(step))
        self.events.append(CheckpointWritten(step, directory))
        return True

    # --- driver -------------------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """End the run after the step that is running and the evaluation that may follow it."""
        self._stop_requested = True

    @property
    def stopped(self) -> bool:
        """Whether the producers have nothing left to do: the backbone stopped, or all units are done."""
        if self._stop_at is not None:
            return not any(unit_index < self._stop_at for unit_index in self._agenda.unfinished)
        return self._agenda.upcoming is None and not self._agenda.unfinished

    def take_events(self) -> tuple[Event, ...]:
        """Hand over what happened since the last call."""
        events = tuple(self.events)
        self.events.clear()
        return events

    def describe_wait(self, unit_index: int, slot: int | None, rank: int) -> str:
        """Who waits for what, for the message of a stalled wait."""
        plan = self._agenda.plan_of(unit_index)
        if plan is None:
            return self._agenda.describe_wait(unit_index)
        return self._readers.describe_wait(plan, slot, rank)

    def record(self, spans: tuple[Span, ...]) -> None:
        """Keep spans for the trace until its last step is done."""
        if spans and self._agenda.last_step < self._last_traced_step:
            self.events.append(SpansRecorded(spans))

    def _reject(self, rejections: tuple[Rejection, ...]) -> None:
        # A batch that is encoded again meets the same bad image again; it counts once.
        fresh = tuple(rejection for rejection in rejections if self._directory.reject(rejection))
        if not fresh:
            return
        self._num_rejected += sum(1 for rejection in fresh if _is_training(rejection.ref))
        self.events.append(Rejected(fresh, self._num_rejected, self._num_seen))


def _is_training(ref: SampleRef) -> bool:
    return ref.position < EVAL_POSITION_BASE
