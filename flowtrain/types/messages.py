"""Control messages between the coordinator and the actors of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from flowtrain.types.memory import Extent, PoolStats
from flowtrain.types.plan import EncodeBatch, Unit, UnitKind
from flowtrain.types.samples import Rejection, SampleRef, SizedSample
from flowtrain.types.wire import message


@message
class PartReady:
    """An owner reports that a part lies in its segment. ``epoch`` is the lease's; extents are in row order."""

    position: int
    part: str
    epoch: int
    extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class Lease:
    """A batch handed to one owner. Every ref is forwarded (so that the bits never change); ``needed`` are kept.

    nbytes: what the needed parts take, aligned; reserved in the owner's segment until they are READY. epoch: reports
    under an older one are refused.
    """

    lease_id: int
    epoch: int
    batch: EncodeBatch
    refs: tuple[SampleRef, ...]
    needed: tuple[int, ...]
    nbytes: int


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
    """What one backbone rank says after a unit; of a replica's ranks the coordinator makes one report.

    loss, grad_norm, lr and the totals are global (equal on all ranks); the durations are this rank's own. grad_norm and
    lr are None for an evaluation. starved_s: the rank waited for a microbatch. fetch_s: its prefetch thread copied from
    the pool. Times are seconds; started_s and finished_s are since the Unix epoch. microbatch_s: forward and backward
    of each microbatch by its slot (``MicrobatchClock``), without the wait for its data; empty for an evaluation.
    """

    unit: int
    kind: UnitKind
    step: int
    dp_rank: int
    loss: float
    grad_norm: float | None
    lr: float | None
    num_samples: int
    num_tokens: int
    num_target_tokens: int
    started_s: float
    finished_s: float
    starved_s: float
    fetch_s: float
    microbatch_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Joined:
    """What a pool process learns when it joins: its place in the address space, and where the feeder goes on.

    sampler_state and next_unit matter to the feeder alone: it continues after the last unit that was reported.
    """

    process_index: int
    sampler_state: dict[str, int | list[int]] | None = None
    next_unit: int = 0


@dataclass(frozen=True, slots=True)
class FeedReport:
    """The feeder reports one sized unit (or, with ``unit`` None, only asks), and text parts that it made again.

    texts[i] is the READY text part of sized[i]. sampler_state: the sampler's integers after this unit.
    """

    unit: Unit | None = None
    sized: tuple[SizedSample, ...] = ()
    texts: tuple[PartReady, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    sampler_state: dict[str, int | list[int]] | None = None
    remade: tuple[PartReady, ...] = ()
    stats: PoolStats | None = None
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class FeedOrder:
    """What the feeder does next: free ``released``, make ``remake`` again, size ``unit`` if it is given.

    consumed: positions of the unit that an earlier run has consumed, to be drawn but not sized.
    """

    unit: Unit | None
    remake: tuple[SampleRef, ...]
    released: tuple[Extent, ...]
    stop: bool
    consumed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EncoderReport:
    """An encoder hands in what it finished; waited_s: time since its last report that it had nothing to encode."""

    ready: tuple[PartReady, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    stats: PoolStats | None = None
    blocked_s: float = 0.0
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class LeaseOrder:
    """What an encoder does next: free ``released``, then encode ``lease`` if there is one.

    blocked: no lease because the producer must wait for the consumer (memory or lookahead).
    """

    lease: Lease | None
    released: tuple[Extent, ...]
    blocked: bool
    stop: bool
