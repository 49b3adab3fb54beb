"""What the flow itself adds to the trace: planning, occupancy of the pool, lookahead, and restarts."""

from __future__ import annotations

from flowtrain.flow.holdings import Holdings
from flowtrain.flow.members import Members
from flowtrain.flow.report import EventLog
from flowtrain.flow.steps import PlannedUnit, Steps
from flowtrain.types.messages import Span
from flowtrain.types.tracing import Counter, TraceSteps

COORDINATOR = "coordinator"


class FlowTrace:
    """Writes spans and counters into the log while a traced step is not done.

    A counter is written when its value may have changed, with the messages that come anyway.
    """

    def __init__(self, log: EventLog, members: Members, steps: Steps, holdings: Holdings) -> None:
        self._log = log
        self._members = members
        self._steps = steps
        self._holdings = holdings
        self._lost_s: dict[str, float] = {}
        self._had_hbm = False

    def take_over(self, earlier: FlowTrace) -> None:
        """Go on with the processes of an earlier flow."""
        self._lost_s, self._had_hbm = earlier._lost_s, earlier._had_hbm

    @property
    def is_on(self) -> bool:
        """Whether spans and counters are kept now."""
        return self._log.is_tracing(self._steps.num_done)

    def ask_for(self, num_steps: int) -> TraceSteps:
        """Trace so many more steps, from the first that no replica has begun."""
        first = self._steps.next_step
        self._log.trace_until(first + num_steps - 1)
        return TraceSteps(first, first + num_steps - 1)

    def record(self, spans: tuple[Span, ...]) -> None:
        """Keep spans of an actor."""
        self._log.spans(spans, self._steps.num_done)

    def planned(self, planned: PlannedUnit) -> None:
        """Note that a unit was planned."""
        started_s, finished_s = (at_s + self._log.epoch_s for at_s in (planned.started_s, planned.finished_s))
        args: dict[str, int | float | str] = {"step": planned.plan.unit.step}
        self.record((Span(COORDINATOR, "pack", started_s, finished_s, args),))

    def occupied(self, owner: int) -> None:
        """Note how full the segment of a process is, and the HBM of all."""
        stats = self._log.segments.get(owner)
        if stats is None or not self.is_on:
            return
        free_nbytes = max(stats.bound_nbytes - stats.used_nbytes, 0)
        dram = {"used bytes": float(stats.used_nbytes), "free bytes": float(free_nbytes)}
        counters = [Counter(self._members.name_of(owner), "pool dram", self._log.now_s, dram)]
        if (hbm_nbytes := self._holdings.hbm_nbytes) or self._had_hbm:
            self._had_hbm = True
            counters.append(Counter(COORDINATOR, "pool hbm", self._log.now_s, {"used bytes": float(hbm_nbytes)}))
        self._log.counters(tuple(counters))

    def ahead(self) -> None:
        """Note how many units are sized and encoded ahead of the backbone."""
        if not self.is_on:
            return
        now_s, steps = self._log.now_s, self._steps
        ahead = {"sized": steps.num_sized_ahead, "encoded": steps.num_encoded_ahead}
        counters = [Counter(COORDINATOR, f"units {kind} ahead", now_s, {"units": n}) for kind, n in ahead.items()]
        self._log.counters(tuple(counters))

    def lost(self, owner: int, for_good: bool) -> None:
        """Note that a process is gone, with its segment."""
        name, now_s = self._members.name_of(owner), self._log.now_s
        if for_good:
            self.record((Span(name, "given_up", now_s, now_s),))
        else:
            self._lost_s[name] = now_s
        if self.is_on:
            self._log.counters((Counter(name, "pool dram", now_s, {"used bytes": 0.0, "free bytes": 0.0}),))

    def missing(self, name: str) -> None:
        """Note that a process is started again; it may not have joined before."""
        self._lost_s[name] = self._log.now_s

    def joined(self, name: str) -> None:
        """Note that a process has joined; one that was lost is back with it, which is an event too."""
        if (lost_s := self._lost_s.pop(name, None)) is not None:
            now_s = self._log.now_s
            self.record((Span(name, "restart", lost_s, now_s),))
            self._log.rejoined(name, now_s - lost_s)
