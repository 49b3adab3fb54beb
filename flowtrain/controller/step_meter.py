"""Turns the end of a unit into the figures of a step."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from statistics import fmean

from flowtrain.controller.prepare import RunSpec
from flowtrain.types.events import UnitDone
from flowtrain.types.memory import SegmentUse
from flowtrain.types.metrics import PoolUse, StepMetrics
from flowtrain.types.plan import DevicePeak

MAX_SHOWN_SEGMENTS = 64
"""Segments that a step shows one by one; of more it shows the sums by role and tier."""


class StepMeter:
    """Measures steps from end to end. Metrics are in the devices' own time, also of emulated ones.

    num_skipped: steps of the run that were skipped before this start.
    peak: of one device, set once it is known. All devices are assumed to be of the backbone's kind; a device is what
    one encoder or backbone actor runs on.
    """

    def __init__(self, run_spec: RunSpec, num_skipped: int) -> None:
        self._run_spec = run_spec
        self.num_skipped = num_skipped
        self.peak: DevicePeak | None = None
        self._last_finished_s: float | None = None
        # Since the last step, also in evaluations.
        self._num_restarts = self._num_retries = 0
        self._read_nbytes: Counter[str] = Counter()
        plan = run_spec.plan
        self._num_backbone = plan.backbone.num_actors
        self._num_devices = self._num_backbone
        if plan.mode != "colocated":  # there encoders share the ranks' devices
            self._num_devices += sum(module.num_actors for module in plan.encoders.values())
        emulation = run_spec.config.emulation
        self._is_emulated = emulation is not None
        self.time_scale = emulation.time_scale if emulation is not None else 1.0

    def rewind(self, num_skipped: int) -> None:
        """Go back to an earlier step. num_skipped: steps of the run that were skipped until then."""
        self.num_skipped = num_skipped
        self._last_finished_s = None

    def restarted(self) -> None:
        """Count the restart of an actor."""
        self._num_restarts += 1

    def evaluated(self, done: UnitDone) -> float:
        """Note the end of an evaluation; returns its seconds. The next step is measured from here."""
        self._count(done)
        started_s, finished_s = self._bounds(done)
        self._last_finished_s = finished_s
        return (finished_s - started_s) / self.time_scale

    def measured(self, done: UnitDone) -> StepMetrics:
        """Return the figures of a training step, without the loss of an evaluation."""
        self._count(done)
        started_s, finished_s = self._bounds(done)
        self._last_finished_s = finished_s
        report, scale = done.reports[0], self.time_scale
        step_time_s = max(finished_s - started_s, 1e-9) / scale
        assert report.lr is not None and report.grad_norm is not None
        is_skipped = report.is_spike or not (math.isfinite(report.loss) and math.isfinite(report.grad_norm))
        self.num_skipped += is_skipped
        metrics = StepMetrics(
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
            backbone_mfu=self._mfu(done.flops.backbone + done.flops.connector, step_time_s, self._num_backbone),
            peak_flops=self.peak.flops if self.peak else None,
            starved_s=fmean(each.starved_s for each in done.reports) / scale,
            blocked_s=done.blocked_s / scale,
            fetch_s=fmean(each.fetch_s for each in done.reports) / scale,
            read_nbytes=sum(each.read_nbytes for each in done.reports),
            plan_digest=done.plan_digest,
            plan_time_s=done.plan_time_s,
            plan_wait_s=done.plan_wait_s,
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
            source_losses=self._source_losses(done),
            slot_imbalance=done.slot_imbalance,
            lookahead_steps=done.lookahead,
            read_nbytes_by_transport=dict(self._read_nbytes),
            retries=self._num_retries,
            restarts=self._num_restarts,
            pool=pool_uses(done.pool),
            spike=report.is_spike,
        )
        self._num_restarts = self._num_retries = 0
        self._read_nbytes.clear()
        return metrics

    def _bounds(self, done: UnitDone) -> tuple[float, float]:
        started_s = self._last_finished_s or min(each.started_s for each in done.reports)
        return started_s, max(each.finished_s for each in done.reports)

    def _count(self, done: UnitDone) -> None:
        self._num_retries += done.retries
        self._read_nbytes.update(done.read_by_transport)

    def _mfu(self, flops: float, step_time_s: float, num_devices: int) -> float | None:
        return flops / step_time_s / (num_devices * self.peak.flops) if self.peak else None

    def _source_losses(self, done: UnitDone) -> dict[str, float]:
        names = self._run_spec.source_names
        if self._is_emulated:  # nothing is computed
            return {}
        if len(names) == 1:
            return {names[0]: done.reports[0].loss}
        return {names[source]: loss for source, loss in done.source_losses.items()}


def pool_uses(segments: Iterable[SegmentUse]) -> tuple[PoolUse, ...]:
    """Return the pool's use by process; by role and tier alone where there are many processes."""
    uses = [
        PoolUse(*role_and_rank(each.name), each.tier.value, each.used_nbytes, each.bound_nbytes) for each in segments
    ]
    if len(uses) <= MAX_SHOWN_SEGMENTS:
        return tuple(sorted(uses, key=lambda use: (use.role, use.tier, len(use.rank or ""), use.rank)))
    sums: defaultdict[tuple[str, str], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for use in uses:
        used, bound = sums[use.role, use.tier]
        sums[use.role, use.tier] = used + use.used_nbytes, bound + use.bound_nbytes
    return tuple(PoolUse(role, None, tier, *total) for (role, tier), total in sorted(sums.items()))


def role_and_rank(name: str) -> tuple[str, str]:
    """Split an actor's name: ``encoder-0`` is rank 0 of the role ``encoder``."""
    role, _, rank = name.partition("-")
    return role, rank
