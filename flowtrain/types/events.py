"""Events that the coordinator sends to the driver: units done, rejections, processes that are back, checkpoints, costs,
spans."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from flowtrain.types.memory import SegmentUse
from flowtrain.types.messages import RankReport, Span
from flowtrain.types.plan import CostModel, Flops, Unit
from flowtrain.types.samples import Rejection, SamplerState
from flowtrain.types.tracing import Counter
from flowtrain.types.wire import message

LEDGER_SCHEMA = 1
CHECKPOINT_SCHEMA = 2


@message
class LedgerRow:
    """How one position ended: a row of ``ledger.parquet``."""

    position: int
    source: int
    """Index of its source in the configuration."""
    row: int
    """Its row in the source."""
    epoch: int
    """The source's epoch, from 0."""
    step: int
    """Training step of its unit; for an evaluation sample, the step that the evaluation follows."""
    dp_rank: int
    """-1 if it was rejected before planning."""
    slot: int
    """Microbatch of the rank; -1 if it was rejected before planning."""
    state: str
    """``consumed`` or ``rejected``."""


@dataclass(frozen=True, slots=True)
class UnitDone:
    """All ranks finished a unit."""

    unit: Unit
    reports: tuple[RankReport, ...]
    """One per data parallel replica, with the times of its slowest rank."""
    plan_digest: str
    """``StepPlan.digest`` of the unit's plan."""
    plan_time_s: float
    """Seconds that planning the unit took."""
    plan_wait_s: float
    """Seconds that a replica waited for the plan."""
    num_microbatches: int
    """Over all ranks."""
    packing_fill: float
    """Share of the microbatches' capacity that samples fill."""
    dp_imbalance: float
    """Cost of the costliest rank over the mean of all ranks, minus one; 0 if all are equal."""
    flops: Flops
    """Of the samples that ran; samples rejected after planning do not count."""
    blocked_s: float
    """Seconds of the unit in which encoders held no lease, summed over encoders; a wait is split where units end."""
    produced_samples: int
    """Samples whose parts all became READY since the last unit's end."""
    num_rejected: int
    """Training samples rejected so far in the run."""
    pool_dram_nbytes: int
    """Bytes used in DRAM, over all segments."""
    pool_dram_bound_nbytes: int
    """Bytes bound in DRAM, over all segments."""
    ledger: tuple[LedgerRow, ...]
    """Positions that ended with this unit."""
    sampler_state: SamplerState
    """Where a resume continues after this unit."""
    pool_hbm_nbytes: int = 0
    """Bytes of READY parts in HBM."""
    source_losses: dict[int, float] = field(default_factory=dict)
    """Loss of each source with samples in the unit, by its index. Empty for an evaluation, and with one source."""
    slot_imbalance: tuple[float, ...] = ()
    """Of each slot, the cost of its costliest microbatch over the mean, minus one."""
    lookahead: int = 0
    """Units after this one whose parts are all READY."""
    read_by_transport: dict[str, int] = field(default_factory=dict)
    """Bytes that ranks and encoders read from the pool since the last unit's end, by transport."""
    retries: int = 0
    """Reads of storage and leases that were tried again since the last unit's end."""
    pool: tuple[SegmentUse, ...] = ()
    """The segments of the pool."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """Samples were quarantined."""

    rejections: tuple[Rejection, ...]
    num_rejected: int
    """Training samples rejected so far in the run."""
    num_seen: int
    """Training samples sized or rejected so far in the run."""


@dataclass(frozen=True, slots=True)
class Rejoined:
    """A process of the pool that was lost is back: its actor was started again."""

    name: str
    """Name of the actor."""
    down_s: float
    """Seconds from the report of its loss until the new process joined."""


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """All ranks wrote their shares of the checkpoint after ``step`` into ``directory``; the driver commits it."""

    step: int
    directory: str
    duration_s: float = 0.0
    """Seconds from the copy of the state until all ranks had written."""


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    """The checkpoint after ``step`` could not be written; nothing is left of it, and training goes on."""

    step: int
    reason: str
    """What the file system refused, on which rank, with the bytes needed and free."""


@dataclass(frozen=True, slots=True)
class SnapshotKept:
    """The state of all ranks after ``step`` lies in their nodes' memory, outside of their processes."""

    step: int


@dataclass(frozen=True, slots=True)
class CostFitted:
    """A cost model was fitted to measured microbatches (see ``scheduler/cost_fit.py``)."""

    step: int
    """Training steps done."""
    cost: CostModel
    """In seconds."""
    form: Literal["longest", "squares"]
    """Which attention term fits better: the longest sub-sequence's square, or the sum of squares."""
    r2: float
    """Share of the measured variance that the fit explains."""
    other_r2: float
    """Share of the variance that the other form explains."""
    num_rows: int
    """Measured microbatches in the fit, without outliers."""
    in_use: bool
    """Whether later units are planned with it."""


@dataclass(frozen=True, slots=True)
class SlowFound:
    """An encoder, or a replica of the backbone, is much slower than the others of its role."""

    name: str
    """Of the encoder's actor, or of the replica's first rank."""
    ratio: float
    """Its time for the same work over the median of its role."""
    num_workers: int
    """Of its role that were compared."""


@dataclass(frozen=True, slots=True)
class SpansRecorded:
    """Spans and counters for the trace."""

    spans: tuple[Span, ...]
    counters: tuple[Counter, ...] = ()


Event = (
    UnitDone
    | Rejected
    | Rejoined
    | CheckpointWritten
    | CheckpointFailed
    | SnapshotKept
    | CostFitted
    | SlowFound
    | SpansRecorded
)
