"""What the coordinator sends the driver: units done, rejections, checkpoints, spans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from flowtrain.types.messages import RankReport, Span
from flowtrain.types.plan import Flops, Unit
from flowtrain.types.samples import Rejection, SamplerState
from flowtrain.types.wire import message

METRICS_SCHEMA = 1


LEDGER_SCHEMA = 1


CHECKPOINT_SCHEMA = 1


@message
class LedgerRow:
    """One position's end, for ``ledger.parquet``; slot and dp_rank are -1 where it was rejected before planning."""

    position: int
    source: int
    row: int
    epoch: int
    step: int
    dp_rank: int
    slot: int
    state: str


@dataclass(frozen=True, slots=True)
class UnitDone:
    """All ranks finished a unit. Durations in seconds; blocked_s is summed over encoders since the last unit's end.

    reports: one a data parallel replica, with the times of its slowest rank (``flow/report.py``).
    flops: of the samples that ran, not of those rejected after planning.
    sampler_state: where a resume goes on after it.
    """

    unit: Unit
    reports: tuple[RankReport, ...]
    plan_digest: str
    plan_time_s: float
    num_microbatches: int
    packing_fill: float
    dp_imbalance: float
    flops: Flops
    blocked_s: float
    produced_samples: int
    num_rejected: int
    pool_dram_nbytes: int
    pool_dram_bound_nbytes: int
    ledger: tuple[LedgerRow, ...]
    sampler_state: SamplerState
    pool_hbm_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Rejected:
    """Samples were quarantined. num_rejected and num_seen are running totals of training samples."""

    rejections: tuple[Rejection, ...]
    num_rejected: int
    num_seen: int


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """All ranks wrote their share of the checkpoint after ``step`` into ``directory``; the driver commits it."""

    step: int
    directory: str


@dataclass(frozen=True, slots=True)
class CostFitted:
    """The cost of a microbatch was fitted to measured ones, in seconds (see scheduler.cost_profile).

    step: training steps done. cost: fields of the ``CostModel``. form, r2, other_r2, num_rows: as in ``FittedCost``.
    in_use: later units are planned with it.
    """

    step: int
    cost: dict[str, Any]
    form: Literal["longest", "squares"]
    r2: float
    other_r2: float
    num_rows: int
    in_use: bool


@dataclass(frozen=True, slots=True)
class SpansRecorded:
    """Spans for the trace."""

    spans: tuple[Span, ...]


Event = UnitDone | Rejected | CheckpointWritten | CostFitted | SpansRecorded
