"""Wire types: everything that crosses a room or a process, in one file.

Frozen dataclasses. Sizes are in bytes (``_nbytes``), durations in seconds (``_s``), lengths in tokens (``_tokens``).
Types that outlive a process carry a ``schema`` number.

Vocabulary (docs/architecture.md): a *position* is a sample's place in the global order; a *part* is one modality of it
(its text, or its images for one encoder); a *unit* is one turn of the backbone: a training step or an evaluation round.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter
from typing import Any, Literal, TypeVar, dataclass_transform

STEP_PLAN_SCHEMA = 2
METRICS_SCHEMA = 1
LEDGER_SCHEMA = 1
CHECKPOINT_SCHEMA = 1
PLAN_SCHEMA = 1

TEXT_PART = "text"
"""Name of the part that holds a sample's token ids and labels; every other part is named after its encoder."""

EVAL_POSITION_BASE = 1 << 60
"""Evaluation samples live at positions from here on, so that they never shift the training order."""


_T = TypeVar("_T")


@dataclass_transform(frozen_default=True)
def _message(cls: type[_T]) -> type[_T]:
    """A frozen dataclass with slots whose pickle is its class and values: a third of the time of the standard one.

    For what control messages carry by the hundred.
    """
    cls = dataclass(frozen=True, slots=True)(cls)
    assert len(cls.__dataclass_fields__) > 1, f"{cls}: of one field attrgetter gives no tuple"  # type: ignore[attr-defined]
    values = attrgetter(*cls.__dataclass_fields__)  # type: ignore[attr-defined]
    cls.__reduce__ = lambda self: (cls, values(self))  # type: ignore[method-assign]
    return cls


class Tier(enum.StrEnum):
    """A kind of memory that the pool spans."""

    HBM = "hbm"
    DRAM = "dram"


# --- samples -----------------------------------------------------------------------------------------------------


@_message
class SampleRef:
    """Where a sample comes from: position in the global order, index of its source, row in it, the source's epoch."""

    position: int
    source: int
    row: int
    epoch: int


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """What one image becomes: patches the encoder computes, feature rows it emits, tokens the backbone sees."""

    num_patches: int
    num_rows: int
    num_tokens: int


@_message
class PartSize:
    """Size of one part, known before anything is decoded.

    name: ``TEXT_PART`` or an encoder's name. num_items: images (1 for text). num_patches: patches over all images (0
    for text). num_rows: rows of the array that goes into the pool (feature rows, or tokens for text).
    nbytes: exact size of that array.
    """

    name: str
    num_items: int
    num_patches: int
    num_rows: int
    nbytes: int


@_message
class SizedSample:
    """A sample whose lengths are known.

    num_tokens: length of its backbone sequence, vision tokens included. num_vision_tokens: those among them that
    images fill. num_target_tokens: tokens that carry loss (after the shift by one).
    """

    ref: SampleRef
    num_tokens: int
    num_vision_tokens: int
    num_target_tokens: int
    parts: tuple[PartSize, ...]

    @property
    def position(self) -> int:
        """The sample's place in the global order."""
        return self.ref.position


class RejectReason(enum.StrEnum):
    """Why a sample is quarantined."""

    CORRUPT_IMAGE = "corrupt_image"
    MISSING_IMAGE = "missing_image"
    DECOMPRESSION_BOMB = "decompression_bomb"
    OVERSIZED_SAMPLE = "oversized_sample"
    PLACEHOLDER_MISMATCH = "placeholder_mismatch"
    EMPTY_ANSWER = "empty_answer"
    MALFORMED_SAMPLE = "malformed_sample"


@dataclass(frozen=True, slots=True)
class Rejection:
    """A quarantined sample; ``detail`` says what was seen, with both values where two disagree."""

    ref: SampleRef
    reason: RejectReason
    detail: str


# --- memory pool ---------------------------------------------------------------------------------------------------


@_message
class Extent:
    """A contiguous run of bytes in the pool's address space."""

    gva: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class DeviceExport:
    """What the device runtime of a peer on the same node needs to map device memory (``mempool/tiers/hbm.py``).

    runtime: its name. handle: of the allocation; storage_nbytes from storage_offset of it are the segment and behind it
    its stamp. counter_file, counter_index: where torch counts readers. stamp: random bytes that the memory ends with.
    started_ticks: when the process started, in clock ticks since boot.
    """

    runtime: str
    handle: bytes
    storage_nbytes: int
    storage_offset: int
    counter_file: bytes
    counter_index: int
    stamp: bytes
    started_ticks: int


@dataclass(frozen=True, slots=True)
class SegmentExport:
    """What a process publishes of its bound memory in one tier, enough for a peer to map it.

    process_index: the process's place in the address space, never used again in a run. node_id: peers with the same
    value can map ``/proc/<pid>/fd/<fd>`` (-1 in HBM). bound_nbytes: bytes bound from the segment's start. network: what
    the network transport of a peer on another node needs, opaque to everybody else; None where the process offers none.
    device: of HBM alone.
    """

    process_index: int
    node_id: str
    tier: Tier
    pid: int
    fd: int
    bound_nbytes: int
    network: bytes | None = None
    device: DeviceExport | None = None


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Occupancy of one process's segment, in bytes; what is promised to leases counts as used.

    largest_free_nbytes: of the largest free run. fragmentation: share of all free bytes, promised ones included, that
    lie outside that run.
    """

    bound_nbytes: int
    used_nbytes: int
    free_nbytes: int
    largest_free_nbytes: int
    num_extents: int
    fragmentation: float = 0.0


# --- step plans ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Flops:
    """Model FLOPs of a unit by module, as ``flowtrain.costs.flops`` counts them."""

    encoders: float
    connector: float
    backbone: float

    @property
    def total(self) -> float:
        """FLOPs over all modules."""
        return self.encoders + self.connector + self.backbone


@dataclass(frozen=True, slots=True)
class DevicePeak:
    """What one device can do at most in the run's compute type, the denominator of MFU.

    device: its name, as torch has it, or ``cpu``. flops: dense FLOP/s. source: a data sheet, or how it was measured.
    """

    device: str
    flops: float
    source: str


class UnitKind(enum.StrEnum):
    """What the backbone does with a unit."""

    TRAIN = "train"
    EVAL = "eval"


@dataclass(frozen=True, slots=True)
class Unit:
    """One turn of the backbone.

    index: place in the run's sequence of units. step: optimizer steps finished once a TRAIN unit is done (so the first
    is 1); an EVAL unit carries the step that it follows. first_position, num_positions: its contiguous positions.
    chosen: in ``arrival`` order, as many positions that were taken instead, ascending; empty until then.
    """

    index: int
    kind: UnitKind
    step: int
    first_position: int
    num_positions: int
    chosen: tuple[int, ...] = ()

    @property
    def positions(self) -> Sequence[int]:
        """Positions of this unit, ascending."""
        return self.chosen or range(self.first_position, self.first_position + self.num_positions)


@dataclass(frozen=True, slots=True)
class PlannedSample:
    """A sample's place in a microbatch, with the lengths that give every shape."""

    position: int
    num_tokens: int
    num_vision_tokens: int
    num_target_tokens: int


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A packed sequence for one DP rank. ``samples`` may be empty: the rank then runs one token of zero weight.

    slot: index of the microbatch on its rank; the microbatches of one slot run side by side. cost: as the run's cost
    model sees it (Eq. 3), unitless.
    """

    slot: int
    dp_rank: int
    samples: tuple[PlannedSample, ...]
    cost: float

    @property
    def num_tokens(self) -> int:
        """Backbone tokens in this microbatch."""
        return sum(sample.num_tokens for sample in self.samples)

    @property
    def num_target_tokens(self) -> int:
        """Loss-bearing tokens in this microbatch."""
        return sum(sample.num_target_tokens for sample in self.samples)


@dataclass(frozen=True, slots=True)
class EncodeBatch:
    """Positions whose parts one encoder forwards together; a function of positions and sizes, never of arrival.

    nbytes: exact bytes of all its parts in the pool, each part rounded up to the pool's alignment.
    """

    unit: int
    index: int
    encoder: str
    positions: tuple[int, ...]
    num_patches: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one unit runs: ``num_slots`` times ``dp_size`` microbatches, as columns over its samples.

    microbatch_tokens: the capacity that was packed to. positions: of the samples, microbatch after microbatch, those of
    slot 0 first, in a slot those of rank 0 first. lengths, vision_lengths, target_lengths: of the same samples, tokens
    of the backbone sequence, vision tokens and loss-bearing tokens among them. ends: ``[num_microbatches]``, where each
    microbatch ends in these columns. costs: of each microbatch, as the run's cost model sees it. All ranks have the
    same number of microbatches; positions found bad later are subtracted by the backbone.
    """

    unit: Unit
    dp_size: int
    microbatch_tokens: int
    positions: tuple[int, ...]
    lengths: tuple[int, ...]
    vision_lengths: tuple[int, ...]
    target_lengths: tuple[int, ...]
    ends: tuple[int, ...]
    costs: tuple[float, ...]
    encode_batches: tuple[EncodeBatch, ...]
    schema: int = STEP_PLAN_SCHEMA

    @classmethod
    def of_slots(
        cls,
        unit: Unit,
        microbatch_tokens: int,
        slots: Sequence[Sequence[Microbatch]],
        encode_batches: Iterable[EncodeBatch],
    ) -> StepPlan:
        """Build from ``slots[k][rank]``, whose microbatches say where they stand."""
        microbatches = [microbatch for slot in slots for microbatch in slot]
        samples = [sample for microbatch in microbatches for sample in microbatch.samples]
        return cls(
            unit=unit,
            dp_size=len(slots[0]),
            microbatch_tokens=microbatch_tokens,
            positions=tuple(sample.position for sample in samples),
            lengths=tuple(sample.num_tokens for sample in samples),
            vision_lengths=tuple(sample.num_vision_tokens for sample in samples),
            target_lengths=tuple(sample.num_target_tokens for sample in samples),
            ends=tuple(accumulate(len(microbatch.samples) for microbatch in microbatches)),
            costs=tuple(microbatch.cost for microbatch in microbatches),
            encode_batches=tuple(encode_batches),
        )

    @property
    def num_slots(self) -> int:
        """Microbatches of each rank."""
        return len(self.ends) // self.dp_size

    @property
    def num_microbatches(self) -> int:
        """Microbatches over all ranks."""
        return len(self.ends)

    @property
    def num_samples(self) -> int:
        """Planned samples over all ranks."""
        return len(self.positions)

    @property
    def num_tokens(self) -> int:
        """Planned backbone tokens over all ranks."""
        return sum(self.lengths)

    @property
    def num_vision_tokens(self) -> int:
        """Planned vision tokens over all ranks."""
        return sum(self.vision_lengths)

    @property
    def num_target_tokens(self) -> int:
        """Planned loss-bearing tokens over all ranks."""
        return sum(self.target_lengths)

    def microbatch(self, slot: int, dp_rank: int) -> Microbatch:
        """Return the ``slot``-th microbatch of a rank."""
        start, end = self._bounds(slot, dp_rank)
        columns = (self.positions, self.lengths, self.vision_lengths, self.target_lengths)
        samples = zip(*(column[start:end] for column in columns), strict=True)
        return Microbatch(
            slot,
            dp_rank,
            tuple(PlannedSample(*sample) for sample in samples),
            self.costs[slot * self.dp_size + dp_rank],
        )

    def microbatch_positions(self, slot: int, dp_rank: int) -> tuple[int, ...]:
        """Return the positions in one microbatch."""
        start, end = self._bounds(slot, dp_rank)
        return self.positions[start:end]

    def microbatch_lengths(self, slot: int, dp_rank: int) -> tuple[int, ...]:
        """Return the backbone tokens of each sample in one microbatch."""
        start, end = self._bounds(slot, dp_rank)
        return self.lengths[start:end]

    @property
    def slots(self) -> tuple[tuple[Microbatch, ...], ...]:
        """All microbatches, made for this call: ``slots[k][rank]`` is the k-th of a rank."""
        return tuple(tuple(self.microbatch(k, rank) for rank in range(self.dp_size)) for k in range(self.num_slots))

    def rank_microbatches(self, dp_rank: int) -> tuple[Microbatch, ...]:
        """Return the microbatches of one rank in the plan's order."""
        return tuple(self.microbatch(slot, dp_rank) for slot in range(self.num_slots))

    def digest(self) -> str:
        """Return a hash of the whole plan, 16 hexadecimal digits: equal plans have equal ones, on every machine."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    def _bounds(self, slot: int, dp_rank: int) -> tuple[int, int]:
        assert 0 <= slot < self.num_slots and 0 <= dp_rank < self.dp_size, (slot, dp_rank)
        number = slot * self.dp_size + dp_rank
        return self.ends[number - 1] if number else 0, self.ends[number]


# --- control messages ----------------------------------------------------------------------------------------------


@_message
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


@_message
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


# --- messages between the coordinator and everybody else --------------------------------------------------------------


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


@_message
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

    reports: one a data parallel replica, with the times of its slowest rank (``actors/readers.py``).
    flops: of the samples that ran, not of those rejected after planning.
    sampler_state: where a resume goes on behind it: the sampler's, and in ``arrival`` order under ``consumed`` the
    positions from there on that are consumed already.
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
    sampler_state: dict[str, int | list[int]]
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
