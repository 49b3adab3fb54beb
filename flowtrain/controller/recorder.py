"""Writes the coordinator's events into the run's files and to the display."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

from flowtrain.controller.audit import AuditFiles
from flowtrain.controller.prepare import RunSpec
from flowtrain.controller.run_rates import RunRates
from flowtrain.errors import RunFileError
from flowtrain.flow.consumed import ConsumedPositions
from flowtrain.observability.diagnostics import Diagnostic
from flowtrain.observability.files import read_json_lines
from flowtrain.observability.ledger import LedgerRow, LedgerState, LedgerWriter
from flowtrain.observability.metrics import MetricsWriter, StepMetrics, read_metrics
from flowtrain.observability.progress import ProgressDisplay, ProgressState
from flowtrain.observability.quarantine import QuarantineWriter
from flowtrain.observability.run_dir import RunDir
from flowtrain.types.events import (
    CheckpointFailed,
    CheckpointWritten,
    CostFitted,
    Event,
    Rejected,
    SpansRecorded,
    UnitDone,
)
from flowtrain.types.events import LedgerRow as RowMessage
from flowtrain.types.plan import DevicePeak, UnitKind
from flowtrain.types.samples import EVAL_POSITION_BASE, Rejection, SamplerState

logger = logging.getLogger(__name__)

MetricsSink = Callable[[StepMetrics], None]

MAX_BUFFERED_ROWS = 1 << 16
"""Rows of the ledger kept in memory between checkpoints; more rows are written earlier."""


class Recorder:
    """Writes metrics, ledger and quarantine of one run, and keeps the totals that a checkpoint needs.

    first_step, consumed: steps done before this start, and their positions; files are cut back to them.
    sink: receives each step's metrics (Ray's gauges), or None.
    peak: of one device, set once it is known. All devices are assumed to be of the backbone's kind; a device is what
    one encoder or backbone actor runs on.
    """

    def __init__(
        self,
        run_spec: RunSpec,
        files: RunDir,
        first_step: int,
        consumed: ConsumedPositions,
        display: ProgressDisplay,
        sink: MetricsSink | None,
    ) -> None:
        self._run_spec = run_spec
        self._files = files
        self._display = display
        self._sink = sink
        self._metrics = MetricsWriter(files.metrics)
        self._ledger = LedgerWriter(files.ledger)
        self._quarantine = QuarantineWriter(files.quarantine, run_spec.source_names, run_spec.indexes)
        self._audit = AuditFiles(display.note)
        self._shown_by_ray = Diagnostic("Ray's metrics")
        self._held: StepMetrics | None = None
        self._held_bound_nbytes = 0
        self._num_buffered_rows = 0
        self._last_finished_s: float | None = None
        plan = run_spec.plan
        self._num_encoders = sum(module.data_parallel_size for module in plan.encoders.values())
        self._num_backbone = plan.backbone.num_actors
        self._num_devices = self._num_backbone
        if plan.mode != "colocated":  # there encoders share the ranks' devices
            self._num_devices += sum(module.num_actors for module in plan.encoders.values())
        emulation = run_spec.config.emulation
        self._is_emulated = emulation is not None
        self._time_scale = emulation.time_scale if emulation is not None else 1.0
        self.rates = RunRates(self._time_scale)
        self.peak: DevicePeak | None = None
        self.last: StepMetrics | None = None
        self.last_eval_loss: float | None = None
        self.num_skipped = 0
        self.sampler_states: dict[int, SamplerState] = {}
        self.num_rejected = self._cut_back(first_step, consumed)
        self._known_eval_rows = {
            record["row"] for record in read_json_lines(files.quarantine) if record["position"] >= EVAL_POSITION_BASE
        }
        self.num_seen = len(consumed)

    def _cut_back(self, first_step: int, consumed: ConsumedPositions) -> int:
        self._metrics.truncate_after(first_step)
        self.num_skipped = sum(record.get("skipped", False) for record in read_metrics(self._files.metrics))
        self._ledger.truncate_after(first_step)
        every = self._run_spec.eval_every
        rounds = first_step // every if every else 0
        first_eval = EVAL_POSITION_BASE + rounds * self._run_spec.num_eval
        return self._quarantine.keep(
            lambda position: position in consumed if position < EVAL_POSITION_BASE else position < first_eval
        )

    def take(self, event: Event) -> None:
        """Record one event."""
        if isinstance(event, UnitDone):
            self._take_unit(event)
        elif isinstance(event, Rejected):
            self._take_rejections(event)
        else:  # the controller's own
            assert isinstance(event, CheckpointWritten | CheckpointFailed | CostFitted | SpansRecorded), event

    def flush(self, step: int) -> None:
        """Make ledger, metrics and quarantine durable up to ``step``; called before its checkpoint becomes complete.

        Raises RunFileError if one of them cannot be written now; its lines then stay in memory.
        """
        if self._held is not None and self._held.step <= step:  # a later step may still wait for its evaluation
            self._release_held(None)
        self._flush_ledger()
        self._audit.attempt(self._metrics, self._metrics.sync)
        self._audit.attempt(self._quarantine, self._quarantine.sync)
        self._audit.check_written(self._ledger, self._metrics, self._quarantine)

    def _flush_ledger(self) -> None:
        self._num_buffered_rows = 0
        self._audit.attempt(self._ledger, self._ledger.flush)

    def forget_before(self, step: int) -> None:
        """Drop the sampler states of steps up to ``step``; no later checkpoint needs them."""
        self.sampler_states = {known: state for known, state in self.sampler_states.items() if known > step}

    def close(self) -> None:
        """Write the held line and close the files; ledger rows after the last flush are dropped.

        Errors are logged, since they must not replace the one that ended the run.
        """
        try:
            self._release_held(None)
        except RunFileError as error:
            logger.warning("%s", error)
        for writer in (self._metrics, self._quarantine):
            self._audit.close(writer, writer.close)

    def _take_unit(self, done: UnitDone) -> None:
        step = done.unit.step
        if done.unit.kind is UnitKind.EVAL:
            self._last_finished_s = max(report.finished_s for report in done.reports)
            self._release_held(done.reports[0].loss)
            return
        self._ledger.append([self._ledger_row(row) for row in done.ledger])
        self._num_buffered_rows += len(done.ledger)
        if self._num_buffered_rows >= MAX_BUFFERED_ROWS:
            self._flush_ledger()
        self.sampler_states[step] = done.sampler_state
        self._release_held(None)
        self._held = self._step_metrics(done)
        self._held_bound_nbytes = done.pool_dram_bound_nbytes
        every = self._run_spec.eval_every
        if every is None or step % every != 0:
            self._release_held(None)

    def _release_held(self, eval_loss: float | None) -> None:
        """Write the last step's line, which is held while an evaluation may still add its loss."""
        if self._held is None:
            return
        metrics, self._held = replace(self._held, eval_loss=eval_loss), None
        self._audit.attempt(self._metrics, self._metrics.write, metrics)
        self.last = metrics
        self.rates.take(metrics)
        self.last_eval_loss = eval_loss if eval_loss is not None else self.last_eval_loss
        if metrics.rewound_to is not None:
            self._display.note(
                f"step {metrics.step}: weights and optimizer went back to the checkpoint of step {metrics.rewound_to}"
            )
        self._display.update(ProgressState(metrics, self._held_bound_nbytes, self._num_encoders))
        if self._sink is not None:
            self._shown_by_ray.attempt(self._sink, metrics)

    def _step_metrics(self, done: UnitDone) -> StepMetrics:
        report = done.reports[0]
        finished_s = max(each.finished_s for each in done.reports)
        started_s = self._last_finished_s or min(each.started_s for each in done.reports)
        self._last_finished_s = finished_s
        scale = self._time_scale  # of waits; metrics are in the devices' own time
        step_time_s = max(finished_s - started_s, 1e-9) / scale
        backbone_flops = done.flops.backbone + done.flops.connector
        assert report.lr is not None and report.grad_norm is not None
        is_skipped = not (math.isfinite(report.loss) and math.isfinite(report.grad_norm))
        self.num_skipped += is_skipped
        return StepMetrics(
            step=done.unit.step,
            # This counts positions consumed by now, whichever they are.
            epoch=(done.unit.first_position + done.unit.num_positions) / self._run_spec.epoch_positions,
            loss=report.loss,
            lr=report.lr,
            grad_norm=report.grad_norm,
            num_samples=report.num_samples,
            num_tokens=report.num_tokens,
            num_target_tokens=report.num_target_tokens,
            step_time_s=step_time_s,
            tokens_per_s=report.num_tokens / step_time_s,
            tokens_per_s_per_device=report.num_tokens / step_time_s / self._num_devices,
            mfu=self._mfu(done.flops.total, step_time_s, self._num_devices),
            backbone_mfu=self._mfu(backbone_flops, step_time_s, self._num_backbone),
            peak_flops=self.peak.flops if self.peak else None,
            starved_s=fmean(each.starved_s for each in done.reports) / scale,
            blocked_s=done.blocked_s / scale,
            fetch_s=fmean(each.fetch_s for each in done.reports) / scale,
            read_nbytes=sum(each.read_nbytes for each in done.reports),
            plan_digest=done.plan_digest,
            plan_time_s=done.plan_time_s,
            produced_samples_per_s=done.produced_samples / step_time_s,
            consumed_samples_per_s=report.num_samples / step_time_s,
            num_microbatches=done.num_microbatches,
            packing_fill=done.packing_fill,
            dp_imbalance=done.dp_imbalance,
            pool_dram_nbytes=done.pool_dram_nbytes,
            pool_hbm_nbytes=done.pool_hbm_nbytes,
            eval_loss=None,
            rejected=done.num_rejected,
            skipped=is_skipped,
            skipped_steps=self.num_skipped,
            emulated=self.peak.device if self.peak and self._is_emulated else None,
            host_s=fmean(each.host_s or 0.0 for each in done.reports) if self._is_emulated else None,
            rewound_to=report.rewound_to,
        )

    def _mfu(self, flops: float, step_time_s: float, num_devices: int) -> float | None:
        return flops / step_time_s / (num_devices * self.peak.flops) if self.peak else None

    def _ledger_row(self, row: RowMessage) -> LedgerRow:
        return LedgerRow(
            position=row.position,
            source=self._run_spec.source_names[row.source],
            row=row.row,
            epoch=row.epoch,
            step=row.step,
            dp_rank=row.dp_rank if row.dp_rank >= 0 else None,
            microbatch=row.slot if row.slot >= 0 else None,
            state=LedgerState(row.state),
        )

    def _take_rejections(self, event: Rejected) -> None:
        self.num_rejected, self.num_seen = event.num_rejected, event.num_seen
        for rejection in event.rejections:
            if self._is_new(rejection):
                self._audit.attempt(self._quarantine, self._quarantine.write, rejection)

    def _is_new(self, rejection: Rejection) -> bool:
        """A bad evaluation sample is rejected in every round; it is written once."""
        if rejection.ref.position < EVAL_POSITION_BASE:
            return True
        if rejection.ref.row in self._known_eval_rows:
            return False
        self._known_eval_rows.add(rejection.ref.row)
        return True
