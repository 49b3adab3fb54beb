"""Turns the events of actors into those of the run, and keeps the totals that a checkpoint needs."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from flowtrain.controller.audit import AuditTrail
from flowtrain.controller.evaluations import Evaluations, StepLosses
from flowtrain.controller.prepare import RunSpec
from flowtrain.controller.run_rates import RunRates
from flowtrain.controller.state import Role
from flowtrain.controller.step_meter import StepMeter, role_and_rank
from flowtrain.errors import RunFileError
from flowtrain.flow.consumed import ConsumedPositions
from flowtrain.flow.units import ends_step
from flowtrain.observability.stream import EventStream
from flowtrain.types.events import (
    CheckpointFailed,
    CheckpointWritten,
    CostFitted,
    Event,
    Rejected,
    Rejoined,
    SlowFound,
    SnapshotKept,
    SpansRecorded,
    UnitDone,
)
from flowtrain.types.metrics import StepMetrics
from flowtrain.types.plan import DevicePeak, UnitKind
from flowtrain.types.run_events import (
    ActorLost,
    EvaluationFinished,
    Quarantined,
    Restarted,
    StepFinished,
    StragglerFound,
)
from flowtrain.types.samples import SamplerState

logger = logging.getLogger(__name__)


class Recorder:
    """Tells the stream of steps, evaluations, rejections, losses and restarts.

    audit: gets what a step's line does not have; it is closed with the recorder.
    evaluations: takes in evaluation rounds.
    consumed: positions of the steps that were done before this start.
    """

    def __init__(
        self,
        run_spec: RunSpec,
        audit: AuditTrail,
        evaluations: Evaluations,
        stream: EventStream,
        consumed: ConsumedPositions,
    ) -> None:
        self._run_spec = run_spec
        self._audit = audit
        self._evaluations = evaluations
        self._stream = stream
        self._meter = StepMeter(run_spec, audit.num_skipped)
        self._held: StepMetrics | None = None
        self._evaluated: list[EvaluationFinished] = []  # of the held step
        self._restarts: dict[str, Restarted] = {}  # of actors that do not work again yet, by their names
        self.rates = RunRates(self._meter.time_scale)
        self.last: StepMetrics | None = None
        self.last_eval_loss: float | None = None
        self.sampler_states: dict[int, SamplerState] = {}
        self.ended_step = stream.step
        """The last step of which all units have ended."""
        self.num_rejected = audit.num_rejected
        self.num_seen = len(consumed)

    @property
    def num_skipped(self) -> int:
        """Steps of the run that were skipped so far."""
        return self._meter.num_skipped

    @property
    def peak(self) -> DevicePeak | None:
        """As of ``StepMeter``."""
        return self._meter.peak

    @peak.setter
    def peak(self, peak: DevicePeak | None) -> None:
        self._meter.peak = peak

    def take(self, event: Event) -> None:
        """Record one event."""
        if isinstance(event, UnitDone):
            self._take_unit(event)
        elif isinstance(event, Rejected):
            self._take_rejections(event)
        elif isinstance(event, Rejoined):
            self._tell_restart(event.name, event.down_s)
        elif isinstance(event, SlowFound):
            self._tell_slow(event)
        else:  # the controller's own
            assert isinstance(
                event, CheckpointWritten | CheckpointFailed | SnapshotKept | CostFitted | SpansRecorded
            ), event

    def lost(self, name: str, role: Role, reason: str, hung_s: float | None, given_up: bool = False) -> None:
        """Record that an actor was lost. hung_s, given_up: as of ``ActorLost``."""
        self._tell_restart(name)
        self._stream.emit(
            ActorLost(
                step=self._stream.step,
                role=role.value,
                name=name,
                reason=reason,
                hung_s=hung_s,
                given_up=given_up,
            )
        )

    def restarted(self, name: str, role: Role, reason: str, hung_s: float | None = None) -> None:
        """Record that a lost actor is started again. hung_s: as of ``ActorLost``.

        The event comes once the new one works or is lost too, at the latest when the run ends.
        """
        self._meter.restarted()
        self._tell_restart(name)
        self._restarts[name] = Restarted(
            step=self._stream.step, role=role.value, name=name, reason=reason, hung_s=hung_s
        )

    def went_back(
        self, name: str, role: Role, reason: str, down_s: float, steps_again: int, hung_s: float | None = None
    ) -> None:
        """Record that the run has gone back to a snapshot or checkpoint, since an actor was lost, and goes on.

        down_s, steps_again, hung_s: as of ``Restarted``.
        """
        self._meter.restarted()
        event = Restarted(
            step=self._stream.step,
            role=role.value,
            name=name,
            reason=reason,
            hung_s=hung_s,
            down_s=down_s,
            steps_again=steps_again,
            timestamp=time.time() - down_s,
        )
        self._stream.emit(event)

    def all_start_again(self) -> None:
        """Record that actors which did not work again yet are ended with all others."""
        for name in list(self._restarts):
            self._tell_restart(name)

    def rewind(self, step: int, consumed: ConsumedPositions) -> int:
        """Forget the steps after ``step``, which are done again; returns their number. consumed: positions until then.

        Raises OSError if a file cannot be cut.
        """
        num_again = (self._held.step if self._held is not None else self._stream.step) - step
        self._held, self._evaluated = None, []
        self._audit.cut_after(step, consumed)
        self._evaluations.forget_after(step)
        self.sampler_states = {known: state for known, state in self.sampler_states.items() if known <= step}
        self._meter.rewind(self._audit.num_skipped)
        self.num_rejected, self.num_seen = self._audit.num_rejected, len(consumed)
        self._stream.step = self.ended_step = step
        self.last = self.last_eval_loss = None
        return num_again

    def flush(self, step: int) -> None:
        """Make ledger, metrics and quarantine durable up to ``step``; called before its checkpoint becomes complete.

        Raises RunFileError if one of them cannot be written now; its lines then stay in memory.
        """
        if self._held is not None and self._held.step <= step:  # a later step may still wait for its evaluation
            self._release_held(None)
        self._audit.flush()

    def forget_before(self, step: int) -> None:
        """Drop the sampler states and losses of steps up to ``step``; no later checkpoint needs them."""
        self._evaluations.forget_before(step)
        self.sampler_states = {known: state for known, state in self.sampler_states.items() if known > step}

    def eval_metrics(self, step: int) -> dict[str, float]:
        """Return the held-out losses after a step, by the names that ``checkpoint.keep_best`` has for them."""
        return self._evaluations.of_step(step).as_metrics()

    def close(self) -> None:
        """Tell of what is held, and close the audit's files; ledger rows after the last flush are dropped.

        Errors are logged, since they must not replace the one that ended the run.
        """
        try:
            self._release_held(None)
        except RunFileError as error:
            logger.warning("%s", error)
        self.all_start_again()
        self._audit.close()

    def _take_unit(self, done: UnitDone) -> None:
        if done.unit.kind is UnitKind.EVAL:
            self._take_evaluation(done)
            return
        step = done.unit.step
        self._audit.add(done.ledger)
        self.sampler_states[step] = done.sampler_state
        self._release_held(None)
        self._held = self._meter.measured(done)
        if self._held.skipped:
            self._audit.skip(done)
        if ends_step(self._run_spec.evaluations, done.unit):
            self.ended_step = step
            self._release_held(None)

    def _take_evaluation(self, done: UnitDone) -> None:
        self._evaluated.append(self._evaluations.take(done, self._meter.evaluated(done)))
        if ends_step(self._run_spec.evaluations, done.unit):
            self.ended_step = done.unit.step
            losses = self._evaluations.of_step(done.unit.step)
            self._release_held(losses)
            self.last_eval_loss = losses.mean

    def _release_held(self, losses: StepLosses | None) -> None:
        """Tell of the last step and its evaluations; it is held while one may still add its loss."""
        metrics, self._held = self._held, None
        if metrics is not None:
            if losses is not None:
                metrics = replace(metrics, eval_loss=losses.mean, eval_losses=losses.by_set)
            self._tell_step(metrics)
        evaluated, self._evaluated = self._evaluated, []
        for event in evaluated:
            self._stream.emit(event)

    def _tell_step(self, metrics: StepMetrics) -> None:
        self.last = metrics
        self.rates.take(metrics)
        self._stream.emit(StepFinished(metrics=metrics))
        if metrics.rewound_to is not None:
            self._stream.warn(
                f"step {metrics.step}: weights and optimizer went back to the checkpoint of step {metrics.rewound_to}"
            )

    def _tell_restart(self, name: str, down_s: float | None = None) -> None:
        """Tell of an actor's last death, unless it was told. down_s: until it worked again; None: it does not."""
        if (restart := self._restarts.pop(name, None)) is None:
            return
        self._stream.emit(replace(restart, down_s=down_s))
        if down_s is not None:
            self._stream.note(f"{name} works again after {down_s:.1f} s")

    def _tell_slow(self, event: SlowFound) -> None:
        role = role_and_rank(event.name)[0]
        self._stream.emit(
            StragglerFound(
                step=self._stream.step,
                role=role,
                name=event.name,
                ratio=event.ratio,
                num_workers=event.num_workers,
            )
        )
        self._stream.warn(
            f"{event.name} is a straggler: it takes {event.ratio:.1f} times as long for the same work as the median of "
            f"{event.num_workers} of its role; look at its node (other jobs, clocks, storage), or leave that node out"
        )

    def _take_rejections(self, event: Rejected) -> None:
        self.num_rejected, self.num_seen = event.num_rejected, event.num_seen
        for rejection in event.rejections:
            if self._audit.quarantine(rejection):
                self._stream.emit(
                    Quarantined(
                        step=self._stream.step,
                        num_rejected=event.num_rejected,
                        position=rejection.ref.position,
                        source=self._audit.source_of(rejection),
                        row=rejection.ref.row,
                        reason=rejection.reason.value,
                    )
                )
