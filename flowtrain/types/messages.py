"""Control messages between the coordinator and the actors of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from flowtrain.types.memory import Extent, PoolStats
from flowtrain.types.plan import CostModel, EncodeBatch, StepPlan, Unit, UnitKind
from flowtrain.types.samples import Rejection, SampleRef, SamplerState, SizedSample
from flowtrain.types.wire import message


@message
class PartReady:
    """An owner's report that a part lies in its segment."""

    position: int
    part: str
    """``TEXT_PART`` or an encoder's name."""
    epoch: int
    """The lease's; 0 for text."""
    extents: tuple[Extent, ...]
    """In row order."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A batch leased to one owner, which forwards it whole, so that the bits never change, and keeps what is needed."""

    lease_id: int
    epoch: int
    """Reports under an older one are refused."""
    batch: EncodeBatch
    refs: tuple[SampleRef, ...]
    """All samples of the batch."""
    needed: tuple[int, ...]
    """Positions whose features go into the pool."""
    nbytes: int
    """What the needed parts take, aligned; reserved in the owner's segment until they are READY."""


@message
class PartLocation:
    """Where a READY part lies now."""

    position: int
    part: str
    extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class MicrobatchLocation:
    """Everything that a rank needs to run one microbatch; ``rejected`` positions are left out of it."""

    unit: int
    slot: int
    dp_rank: int
    parts: tuple[PartLocation, ...]
    rejected: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """A timed stretch of work of one actor, for the trace; times are seconds since the Unix epoch."""

    actor: str
    name: str
    start_s: float
    end_s: float
    args: dict[str, int | float | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one backbone rank reports after a unit; the flow merges those of a replica.

    The loss, the norm, the rate and the totals are global, so equal on all ranks; durations are this rank's own.
    """

    unit: int
    kind: UnitKind
    step: int
    dp_rank: int
    loss: float
    grad_norm: float | None
    """None for an evaluation."""
    lr: float | None
    """None for an evaluation."""
    num_samples: int
    num_tokens: int
    num_target_tokens: int
    started_s: float
    """Since the Unix epoch."""
    finished_s: float
    """Since the Unix epoch."""
    starved_s: float
    """The rank waited for a microbatch."""
    fetch_s: float
    """Its prefetch thread copied from the pool."""
    microbatch_s: tuple[float, ...] = ()
    """Forward and backward of each microbatch by its slot, without the wait for its data; empty for an evaluation."""


@dataclass(frozen=True, slots=True)
class FlowSettings:
    """Where a run's flow starts; the rest of what it needs is the configuration and the model's shape."""

    global_batch_size: int
    dp_size: int
    """Data parallel replicas of the backbone."""
    num_steps: int
    """Of the whole run."""
    total_positions: int | None
    """Training positions of the whole run; None where ``num_steps`` alone ends it."""
    eval_every: int | None
    """Steps between evaluation rounds; None: there are none."""
    num_eval: int
    """Samples of an evaluation round."""
    start_step: int
    """Steps done before."""
    sampler_state: SamplerState
    """After ``start_step``."""
    cost: CostModel
    """What steps are planned with."""
    num_rejected: int
    """Training samples that were rejected so far."""
    num_seen: int
    """Training samples that were sized or rejected so far."""
    replica_size: int = 1
    """Ranks of each replica."""


@dataclass(frozen=True, slots=True)
class Joined:
    """What a pool process learns when it joins. Only the feeder needs more than its index."""

    process_index: int
    """Place in the address space, never used again in the run."""
    sampler_state: SamplerState | None = None
    """After the last unit that was reported; the feeder continues from there."""
    next_unit: int = 0
    """Index of the unit that is sized next, -1 past the end."""


@dataclass(frozen=True, slots=True)
class FeedReport:
    """What the feeder reports: one sized unit or none, and text parts that it produced again."""

    unit: Unit | None = None
    """None: nothing was sized, the feeder only asks."""
    sized: tuple[SizedSample, ...] = ()
    texts: tuple[PartReady, ...] = ()
    """texts[i] is the READY text part of sized[i]."""
    rejections: tuple[Rejection, ...] = ()
    sampler_state: SamplerState | None = None
    """After ``unit``."""
    remade: tuple[PartReady, ...] = ()
    """Text parts that were lost."""
    stats: PoolStats | None = None
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class FeedOrder:
    """What the feeder does next: free ``released``, produce ``remake`` again, size ``unit``, or stop."""

    unit: Unit | None
    remake: tuple[SampleRef, ...]
    released: tuple[Extent, ...]
    stop: bool
    consumed: tuple[int, ...] = ()
    """Positions of the unit that an earlier run has consumed, to be drawn but not sized."""


@dataclass(frozen=True, slots=True)
class RoomOrder:
    """What a feeder with a full segment does next: free ``released``, or stop."""

    released: tuple[Extent, ...]
    stop: bool


@dataclass(frozen=True, slots=True)
class EncoderReport:
    """What an encoder reports of a lease that it finished."""

    ready: tuple[PartReady, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    stats: PoolStats | None = None
    blocked_s: float = 0.0
    """Time since its last report that it had nothing to encode."""
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class HandInReply:
    """The answer to an encoder's report."""

    refused: tuple[Extent, ...]
    """Of parts whose lease is no longer the encoder's; it frees them."""


@dataclass(frozen=True, slots=True)
class LeaseOrder:
    """What an encoder does next: free ``released``, then encode ``lease``, or stop."""

    lease: Lease | None
    """None: it must wait for memory, for the lookahead or for sizes, and asks again."""
    released: tuple[Extent, ...]
    stop: bool


@dataclass(frozen=True, slots=True)
class PlanReply:
    """The plan of a unit, or why there is none."""

    plan: StepPlan | None
    """None: there is none yet, or never."""
    is_past_end: bool
    """The unit will not come: the run ends before it."""


@dataclass(frozen=True, slots=True)
class LocateReply:
    """Where microbatches lie, or why not."""

    locations: tuple[MicrobatchLocation, ...]
    """Empty: the first that was asked for is not ready yet, or never."""
    is_past_end: bool
    """The unit will not come: the run ends before it."""
