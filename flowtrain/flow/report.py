"""The events of a run for the driver: units done with their figures, rejections, checkpoints, spans."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

from flowtrain.flow.steps import PlannedUnit
from flowtrain.scheduler.refit import CostRefitter
from flowtrain.scheduler.summary import imbalance, packing_fill
from flowtrain.types.events import (
    CheckpointFailed,
    CheckpointWritten,
    Event,
    LedgerRow,
    Rejected,
    SpansRecorded,
    UnitDone,
)
from flowtrain.types.memory import PoolStats
from flowtrain.types.messages import RankReport, Span
from flowtrain.types.samples import EVAL_POSITION_BASE, Rejection, SamplerState
from flowtrain.types.tracing import Counter


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
        self.has_news = False
        """Whether the driver must get the events now; spans alone can wait."""
        self._reports: dict[int, list[RankReport]] = {}
        self.segments: dict[int, PoolStats] = {}
        """The last reported occupancy of each living process's DRAM segment."""
        self._blocked_s = 0.0
        self._produced_mark = 0
        self.epoch_s = time.time() - time.monotonic()
        """What turns the monotonic time of this process into the run's clock."""

    def take(self) -> tuple[Event, ...]:
        """Return the events since the last call."""
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
        if spans and self.is_tracing(num_done):
            self._events.append(SpansRecorded(spans))

    def counters(self, counters: tuple[Counter, ...]) -> None:
        """Keep values for the trace; call it only while it is on."""
        self._events.append(SpansRecorded((), counters))

    def stats(self, owner: int, stats: PoolStats | None) -> None:
        """Note the occupancy of a process's segment; None: no new values."""
        if stats is not None:
            self.segments[owner] = stats

    def forget(self, owner: int) -> None:
        """Note that a process is gone, with its segment."""
        self.segments.pop(owner, None)

    def blocked(self, seconds: float) -> None:
        """Add seconds in which an encoder had nothing to encode."""
        self._blocked_s += seconds

    def seen(self, num_samples: int) -> None:
        """Add the number of training samples that were just sized or rejected."""
        self._num_seen += num_samples

    def rejected(self, rejections: Sequence[Rejection]) -> None:
        """Note samples that were quarantined, each for the first time."""
        if rejections:
            self._num_rejected += sum(rejection.ref.position < EVAL_POSITION_BASE for rejection in rejections)
            self.has_news = True
            self._events.append(Rejected(tuple(rejections), self._num_rejected, self._num_seen))

    def checkpoint_written(self, step: int, directory: str) -> None:
        """Note that all ranks have written their shares of a checkpoint."""
        self._events.extend(self._refitter.fitted(step))
        self.has_news = True
        self._events.append(CheckpointWritten(step, directory))

    def checkpoint_failed(self, step: int, reason: str) -> None:
        """Note that a checkpoint could not be written."""
        self.has_news = True
        self._events.append(CheckpointFailed(step, reason))

    def finished(self, members: Sequence[RankReport]) -> bool:
        """Note that a replica finished a unit; True once all replicas have, and then ``unit_done`` is due.

        members: reports of the replica's ranks.
        """
        report = of_replica(members)
        reports = self._reports.setdefault(report.unit, [])
        reports.append(report)
        return len(reports) == self._num_replicas

    def unit_done(
        self,
        planned: PlannedUnit,
        rows: tuple[LedgerRow, ...],
        sampler_state: SamplerState,
        num_produced: int,
        hbm_nbytes: int,
    ) -> None:
        """Note that a unit is consumed.

        planned: the unit with its plan.
        rows: ledger rows of its positions.
        sampler_state: state from which a run continues after it.
        num_produced: positions produced so far in the run.
        hbm_nbytes: bytes of READY parts in HBM.
        """
        plan = planned.plan
        reports = tuple(sorted(self._reports.pop(plan.unit.index), key=attrgetter("dp_rank")))
        self.has_news = True
        self._events.append(
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
                produced_samples=num_produced - self._produced_mark,
                num_rejected=self._num_rejected,
                pool_dram_nbytes=sum(stats.used_nbytes for stats in self.segments.values()),
                pool_dram_bound_nbytes=sum(stats.bound_nbytes for stats in self.segments.values()),
                ledger=rows,
                sampler_state=sampler_state,
                pool_hbm_nbytes=hbm_nbytes,
            )
        )
        self._events.extend(self._refitter.take(plan, reports))
        self._produced_mark = num_produced
        self._blocked_s = 0.0


def of_replica(members: Sequence[RankReport]) -> RankReport:
    """Merge the reports of a replica's ranks.

    Each duration is that of the slowest rank, since the others wait for it at every microbatch. A replica starts with
    its first rank and finishes with its last. Bytes add up.
    """
    return replace(
        members[0],
        started_s=min(member.started_s for member in members),
        finished_s=max(member.finished_s for member in members),
        starved_s=max(member.starved_s for member in members),
        fetch_s=max(member.fetch_s for member in members),
        read_nbytes=sum(member.read_nbytes for member in members),
        host_s=max((member.host_s for member in members if member.host_s is not None), default=None),
        microbatch_s=tuple(map(max, zip(*(member.microbatch_s for member in members), strict=True))),
    )
