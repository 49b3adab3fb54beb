"""The events of a run for the driver: units done with their figures, rejections, checkpoints, spans."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from flowtrain.flow.idle import IdleTime
from flowtrain.flow.steps import PlannedUnit
from flowtrain.flow.stragglers import StragglerWatch
from flowtrain.scheduler.refit import CostRefitter
from flowtrain.scheduler.summary import imbalance, packing_fill, slot_costs, slot_imbalances
from flowtrain.types.events import (
    CheckpointFailed,
    CheckpointWritten,
    Event,
    LedgerRow,
    Rejected,
    Rejoined,
    SlowFound,
    SnapshotKept,
    SpansRecorded,
    UnitDone,
)
from flowtrain.types.memory import PoolStats, SegmentUse, Tier
from flowtrain.types.messages import RankReport, Span
from flowtrain.types.plan import StepPlan
from flowtrain.types.samples import EVAL_POSITION_BASE, Rejection, SamplerState
from flowtrain.types.tracing import Counter as TraceCounter


class EventLog:
    """Collects the reports of actors, and builds an event when all replicas have reported.

    num_replicas: data parallel replicas of the backbone; each reports for all its ranks.
    refitter: fits the cost of microbatches to the reports.
    last_traced_step: spans and counters are kept until this step is done.
    num_rejected: training samples rejected so far.
    num_seen: training samples sized or rejected so far.
    """

    def __init__(
        self, *, num_replicas: int, refitter: CostRefitter, last_traced_step: int, num_rejected: int, num_seen: int
    ) -> None:
        self._num_replicas = num_replicas
        self._refitter = refitter
        self._last_traced_step = last_traced_step
        self._num_rejected = num_rejected
        self._num_seen = num_seen
        self._events: list[Event] = []
        self._spans: list[Span] = []
        self._counters: list[TraceCounter] = []
        self.has_news = False
        """Whether the driver must get the events now; spans alone can wait."""
        self._reports: dict[int, list[RankReport]] = {}
        self.segments: dict[int, PoolStats] = {}
        """The last reported occupancy of each living process's DRAM segment."""
        self.idle: IdleTime | None = IdleTime()
        """Of encoders; it has no part in an earlier flow's, whose leases are gone. None: it is not measured."""
        self._last_finished_s: float | None = None
        self._read_by_transport: Counter[str] = Counter()
        self._num_retries = 0
        self._produced_mark = 0
        self._encoders, self._replicas = StragglerWatch(), StragglerWatch()
        self.epoch_s = time.time() - time.monotonic()
        """What turns the monotonic time of this process into the run's clock."""

    def take_over(self, earlier: EventLog) -> None:
        """Go on with the clock, the trace and the segments of an earlier flow."""
        self.epoch_s = earlier.epoch_s
        self.segments = earlier.segments
        self._last_traced_step = earlier._last_traced_step
        self._events = [event for event in earlier._events if isinstance(event, Rejoined | SpansRecorded)]
        self._spans, self._counters = earlier._spans, earlier._counters
        self.has_news = bool(self._events)

    def take(self) -> tuple[Event, ...]:
        """Return the events since the last call."""
        self._gather()
        events = tuple(self._events)
        self._events.clear()
        self.has_news = False
        return events

    @property
    def now_s(self) -> float:
        """The run's clock now."""
        return time.monotonic() + self.epoch_s

    def trace_until(self, step: int) -> None:
        """Keep spans and counters until this step is done, if not longer."""
        self._last_traced_step = max(self._last_traced_step, step)

    def is_tracing(self, num_done: int) -> bool:
        """Whether spans and counters are kept now. num_done: steps done so far."""
        return num_done < self._last_traced_step

    def spans(self, spans: tuple[Span, ...], num_done: int) -> None:
        """Keep spans for the trace. num_done: steps done so far."""
        if self.is_tracing(num_done):
            self._spans.extend(spans)

    def counters(self, counters: tuple[TraceCounter, ...]) -> None:
        """Keep values for the trace; call it only while it is on."""
        self._counters.extend(counters)

    def _gather(self) -> None:
        """Make one event of what the trace got; it comes before the end of a step, which may end the trace."""
        if self._spans or self._counters:
            self._events.append(SpansRecorded(tuple(self._spans), tuple(self._counters)))
            self._spans.clear()
            self._counters.clear()

    def _tell(self, *events: Event) -> None:
        self._gather()
        self._events.extend(events)
        self.has_news = True

    def stats(self, owner: int, stats: PoolStats | None) -> None:
        """Note the occupancy of a process's segment; None: no new values."""
        if stats is not None:
            self.segments[owner] = stats

    def forget(self, owner: int, name: str) -> None:
        """Note that a process is gone, with its segment."""
        self.segments.pop(owner, None)
        self._encoders.forget(name)

    def encoded(self, name: str, seconds: float, num_patches: int) -> None:
        """Note that an encoder has produced what it leased. seconds: since the lease."""
        self._encoders.add(name, seconds, max(1, num_patches))

    def read(self, by_transport: Mapping[str, int]) -> None:
        """Add bytes that a process read from the pool."""
        self._read_by_transport.update(by_transport)

    def retried(self, count: int) -> None:
        """Add reads of storage or leases that were tried again."""
        self._num_retries += count

    def seen(self, num_samples: int) -> None:
        """Add the number of training samples that were just sized or rejected."""
        self._num_seen += num_samples

    def rejected(self, rejections: Sequence[Rejection]) -> None:
        """Note samples that were quarantined, each for the first time."""
        if rejections:
            self._num_rejected += sum(rejection.ref.position < EVAL_POSITION_BASE for rejection in rejections)
            self._tell(Rejected(tuple(rejections), self._num_rejected, self._num_seen))

    def rejoined(self, name: str, down_s: float) -> None:
        """Note that a process which was lost is back after so many seconds."""
        self._tell(Rejoined(name, down_s))

    def checkpoint_written(self, step: int, directory: str, duration_s: float = 0.0) -> None:
        """Note that all ranks have written their shares of a checkpoint. duration_s: what it took them."""
        self._tell(*self._refitter.fitted(step), CheckpointWritten(step, directory, duration_s))

    def checkpoint_failed(self, step: int, reason: str) -> None:
        """Note that a checkpoint could not be written."""
        self._tell(CheckpointFailed(step, reason))

    def snapshot_kept(self, step: int) -> None:
        """Note that the nodes of all ranks keep a snapshot."""
        self._tell(SnapshotKept(step))

    def finished(self, members: Sequence[RankReport]) -> bool:
        """Note that a replica finished a unit; True once all replicas have, and then ``unit_done`` is due.

        members: reports of the replica's ranks.
        """
        report = of_replica(members)
        self.read(report.read_by_transport)
        reports = self._reports.setdefault(report.unit, [])
        reports.append(report)
        return len(reports) == self._num_replicas

    def unit_done(
        self,
        planned: PlannedUnit,
        rows: tuple[LedgerRow, ...],
        sampler_state: SamplerState,
        num_produced: int,
        lookahead: int,
        segments: tuple[SegmentUse, ...],
    ) -> None:
        """Note that a unit is consumed.

        planned: the unit with its plan.
        rows: ledger rows of its positions.
        sampler_state: state from which a run continues after it.
        num_produced: positions produced so far in the run.
        lookahead: units after it whose parts are all READY.
        segments: use of the pool.
        """
        plan = planned.plan
        reports = tuple(sorted(self._reports.pop(plan.unit.index), key=attrgetter("dp_rank")))
        source_losses = _source_losses(reports, rows)
        if not _made_no_update(reports[0]):  # the driver lists the samples of such a step
            reports = tuple([replace(each, sample_losses=()) for each in reports])
        self._tell(
            UnitDone(
                unit=plan.unit,
                reports=reports,
                plan_digest=plan.digest(),
                plan_time_s=planned.finished_s - planned.started_s,
                plan_wait_s=planned.waited_s,
                num_microbatches=plan.num_microbatches,
                packing_fill=packing_fill(plan),
                dp_imbalance=imbalance(plan),
                flops=planned.flops.sum(without={row.position for row in rows if row.state == "rejected"}),
                blocked_s=self._blocked_in(reports),
                produced_samples=num_produced - self._produced_mark,
                num_rejected=self._num_rejected,
                pool_dram_nbytes=sum(use.used_nbytes for use in segments if use.tier is Tier.DRAM),
                pool_dram_bound_nbytes=sum(use.bound_nbytes for use in segments if use.tier is Tier.DRAM),
                ledger=rows,
                sampler_state=sampler_state,
                pool_hbm_nbytes=sum(use.used_nbytes for use in segments if use.tier is Tier.HBM),
                source_losses=source_losses,
                slot_imbalance=tuple(slot_imbalances(slot_costs(plan)).tolist()),
                lookahead=lookahead,
                read_by_transport=dict(self._read_by_transport),
                retries=self._num_retries,
                pool=segments,
            )
        )
        self._tell(*self._refitter.take(plan, reports))
        self._compare(plan, reports)
        self._produced_mark = num_produced
        self._read_by_transport.clear()
        self._num_retries = 0

    def _blocked_in(self, reports: Sequence[RankReport]) -> float:
        """Idle seconds of encoders within a unit, which lasts from the end of the one before as in the step's time."""
        finished_s = max(each.finished_s for each in reports)
        started_s, self._last_finished_s = self._last_finished_s, finished_s
        if started_s is None:
            started_s = min(each.started_s for each in reports)
        return self.idle.take(started_s, finished_s) if self.idle is not None else 0.0

    def _compare(self, plan: StepPlan, reports: Sequence[RankReport]) -> None:
        """Look for stragglers. With collectives inside a microbatch, replicas wait for the slow one and look alike."""
        for report, cost in zip(reports, slot_costs(plan).sum(axis=0).tolist(), strict=True):
            if report.microbatch_s and cost > 0.0:
                self._replicas.add(f"backbone-dp{report.dp_rank}-pp0-tp0", sum(report.microbatch_s), cost)
        slow = [*self._encoders.found(), *self._replicas.found()]
        self._tell(*[SlowFound(each.name, each.ratio, each.num_workers) for each in slow])


def _made_no_update(report: RankReport) -> bool:
    return report.is_spike or not (math.isfinite(report.loss) and math.isfinite(report.grad_norm or 0.0))


def of_replica(members: Sequence[RankReport]) -> RankReport:
    """Merge the reports of a replica's ranks.

    Each duration is that of the slowest rank, since the others wait for it at every microbatch. A replica starts with
    its first rank and finishes with its last. Bytes add up.
    """
    read: Counter[str] = Counter()
    for member in members:
        read.update(member.read_by_transport)
    return replace(
        members[0],
        started_s=min(member.started_s for member in members),
        finished_s=max(member.finished_s for member in members),
        starved_s=max(member.starved_s for member in members),
        fetch_s=max(member.fetch_s for member in members),
        read_nbytes=sum(member.read_nbytes for member in members),
        read_by_transport=dict(read),
        sample_losses=tuple(loss for member in members for loss in member.sample_losses),
        host_s=max((member.host_s for member in members if member.host_s is not None), default=None),
        microbatch_s=tuple(map(max, zip(*(member.microbatch_s for member in members), strict=True))),
    )


def _source_losses(reports: Iterable[RankReport], rows: Iterable[LedgerRow]) -> dict[int, float]:
    """Return the loss of each source, normalised like that of the unit, from the losses of its samples."""
    source_of = {row.position: row.source for row in rows}
    sums: defaultdict[int, float] = defaultdict(float)
    weights: Counter[int] = Counter()
    for sample in (sample for report in reports for sample in report.sample_losses):
        source = source_of[sample.position]
        sums[source] += sample.loss
        weights[source] += sample.weight
    return {source: sums[source] / weight for source, weight in sorted(weights.items()) if weight}
