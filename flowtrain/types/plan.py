"""Plans: the backbone's degrees, the cost of a microbatch, units, and what each unit runs."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal

STEP_PLAN_SCHEMA = 2
PLAN_SCHEMA = 1

Schedules = tuple[tuple[tuple[str, ...], ...], ...]
"""Action lists in their text form, ``[dp_rank][pp_rank]``."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """Data, pipeline and tensor parallel degrees.

    Rank numbers count the tensor axis first, then the pipeline axis. So a tensor parallel group has consecutive ranks
    and fits on one node.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.pp * self.tp

    @property
    def replica_size(self) -> int:
        """Ranks of one data parallel replica. They all work on the same microbatches."""
        return self.pp * self.tp

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Return (dp, pp, tp) of a rank."""
        replica, member = divmod(rank, self.replica_size)
        return replica, member // self.tp, member % self.tp

    def rank(self, dp_rank: int, pp_rank: int, tp_rank: int) -> int:
        """Return the rank at these coordinates; inverse of ``coordinates``."""
        return (dp_rank * self.pp + pp_rank) * self.tp + tp_rank

    def __str__(self) -> str:
        return f"dp={self.dp} pp={self.pp} tp={self.tp}"


@dataclass(frozen=True, slots=True)
class CostModel:
    """Cost of a microbatch: ``constant + per_token * tokens + per_longest * longest**2 + per_square * sum(len**2)``.

    All four kinds of cost have this form, so one compiled search serves all. A microbatch without samples costs 0.
    """

    name: str
    """Kind of cost, which decides the unit: capacities, FLOPs or seconds."""
    per_token: float
    """Cost of each token of the microbatch."""
    per_longest: float = 0.0
    """Cost per squared length of its longest sub-sequence."""
    per_square: float = 0.0
    """Cost per unit of the sum of its sub-sequences' squared lengths, which is what packed attention computes."""
    constant: float = 0.0
    """Cost of each microbatch, whatever its samples."""

    def __call__(self, lengths: Sequence[int]) -> float:
        """Return the cost of one microbatch; lengths: tokens of its sub-sequences."""
        if not lengths:
            return 0.0
        return float(self.of_sums(sum(lengths), max(lengths), sum(length**2 for length in lengths)))

    def of_sums(self, tokens: Any, longest: Any, squares: Any) -> Any:
        """Return the cost from the three sums, numbers or arrays."""
        return self.constant + self.per_token * tokens + self.per_longest * longest**2 + self.per_square * squares


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
    """Peak of one device in the run's compute type: the denominator of MFU."""

    device: str
    """The device's name in torch, or ``cpu``."""
    flops: float
    """Dense FLOP/s."""
    source: str
    """Where the number is from: a data sheet, or a measurement."""


@dataclass(frozen=True, slots=True)
class GradientReduction:
    """When a run's data parallel ranks sum gradients, as all of them decided."""

    name: Literal["microbatch", "step"]
    reason: str
    """For the user, with the numbers that decided."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """What a run's data parallel ranks shard, as all of them decided; as ``GradientReduction``."""

    name: Literal["full", "gradients", "hybrid"]
    reason: str


@dataclass(frozen=True, slots=True)
class RankStart:
    """What a backbone rank answers when it has started."""

    peak: DevicePeak
    reduction: GradientReduction
    sharding: Sharding
    recomputed: str = ""
    """What each pipeline rank recomputes, for the user, if that was chosen at the start."""


@dataclass(frozen=True, slots=True)
class StateOrigin:
    """Where the state of backbone ranks comes from; neither a checkpoint nor a snapshot: the model's first weights."""

    checkpoint: str | None = None
    """Its directory."""
    snapshot_step: int | None = None
    """Step after which the nodes keep it in their memory."""
    again: bool = False
    """The run's ranks were started before, by the same driver."""


class UnitKind(enum.StrEnum):
    """What the backbone does with a unit."""

    TRAIN = "train"
    EVAL = "eval"


@dataclass(frozen=True, slots=True)
class Unit:
    """What the backbone runs at one time: a training step or an evaluation round."""

    index: int
    """Place in the run's sequence of units."""
    kind: UnitKind
    step: int
    """TRAIN: number of the step, from 1. EVAL: the step that the round follows."""
    first_position: int
    num_positions: int
    """Its positions are consecutive, from ``first_position``."""
    chosen: tuple[int, ...] = ()
    """In ``arrival`` order: the same number of positions, ascending, that run instead. Empty until they are chosen."""
    eval_set: int = field(default=0, repr=False)  # older plans, of one set, keep their digests
    """EVAL: number of the held-out set, in the order of the configuration."""

    @property
    def positions(self) -> Sequence[int]:
        """Positions of this unit, ascending."""
        return self.chosen or range(self.first_position, self.first_position + self.num_positions)


@dataclass(frozen=True, slots=True)
class PlannedSample:
    """A sample of a microbatch, with the lengths that decide every shape; fields as in ``SizedSample``."""

    position: int
    num_tokens: int
    num_vision_tokens: int
    num_target_tokens: int


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A packed sequence for one data parallel rank."""

    slot: int
    """Index of the microbatch on its rank. The ranks run the microbatches of one slot at the same time."""
    dp_rank: int
    samples: tuple[PlannedSample, ...]
    """Empty: the rank runs one token of zero weight."""
    cost: float
    """By the run's ``CostModel``, in that model's unit."""

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
    """Positions whose images one encoder forwards together. It depends on positions and sizes, never on arrival."""

    unit: int
    """Index of the unit that needs them."""
    index: int
    """Place among the unit's encode batches, in order of need."""
    encoder: str
    """Name of the encoder."""
    positions: tuple[int, ...]
    num_patches: int
    """Patches over all its images."""
    nbytes: int
    """Exact bytes of all its parts in the pool, each part rounded up to the pool's alignment."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one unit runs: ``num_slots`` times ``dp_size`` microbatches, as columns over its samples.

    All ranks have the same number of microbatches. The backbone leaves out positions that are found bad later.
    """

    unit: Unit
    dp_size: int
    """Data parallel replicas."""
    microbatch_tokens: int
    """Capacity of a microbatch, in tokens."""
    positions: tuple[int, ...]
    """``[num_samples]``, one microbatch after another: slot 0 first, and rank 0 first within a slot."""
    lengths: tuple[int, ...]
    """``[num_samples]``, tokens of each backbone sequence."""
    vision_lengths: tuple[int, ...]
    """``[num_samples]``, vision tokens among them."""
    target_lengths: tuple[int, ...]
    """``[num_samples]``, tokens among them that carry loss."""
    ends: tuple[int, ...]
    """``[num_microbatches]``, index after each microbatch's last sample in the columns above."""
    costs: tuple[float, ...]
    """``[num_microbatches]``, by the run's cost model."""
    encode_batches: tuple[EncodeBatch, ...]
    """What the encoders forward for the unit, in order of need."""
    schema: int = STEP_PLAN_SCHEMA
    schedules: Schedules = field(default=(), repr=False)
    """Searched action lists in their text form, ``schedules[dp_rank][pp_rank]``; empty: ``pipeline.schedule``.

    All replicas compute in one order of stages, with microbatches of their own: FSDP's collectives meet in it."""

    def __post_init__(self) -> None:
        orders = [[_stage_order(actions) for actions in lists] for lists in self.schedules if lists]
        for dp_rank, order in enumerate(orders):
            assert order == orders[0], f"unit {self.unit.index}: replicas 0 and {dp_rank} run stages in another order"

    @classmethod
    def of_slots(
        cls,
        unit: Unit,
        microbatch_tokens: int,
        slots: Sequence[Sequence[Microbatch]],
        encode_batches: Iterable[EncodeBatch],
    ) -> StepPlan:
        """Build a plan from ``slots[k][rank]``, the microbatch of slot k on each rank."""
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
        """All microbatches, built again by each call: ``slots[k][rank]`` is the k-th of a rank."""
        return tuple(tuple(self.microbatch(k, rank) for rank in range(self.dp_size)) for k in range(self.num_slots))

    def for_replica(self, dp_rank: int) -> StepPlan:
        """Return the plan as one replica gets it: the other replicas' lists are empty."""
        if not self.schedules:
            return self
        return replace(self, schedules=tuple(own if rank == dp_rank else () for rank, own in enumerate(self.schedules)))

    def digest(self) -> str:
        """Return a hash of the whole plan in 16 hexadecimal digits; equal plans have equal hashes on every machine.

        It does not depend on evaluations before a step, which change the numbers of units. Without carried schedules it
        does not depend on that field, which older plans lack.
        """
        text = repr(self._without_evaluations()) + (repr(self.schedules) if self.schedules else "")
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _without_evaluations(self) -> StepPlan:
        """A step's plan with the unit's number that it would have if nothing were evaluated."""
        index = self.unit.step - 1 if self.unit.kind is UnitKind.TRAIN else self.unit.index
        if index == self.unit.index:
            return self
        batches = tuple([replace(batch, unit=index) for batch in self.encode_batches])
        return replace(self, unit=replace(self.unit, index=index), encode_batches=batches)

    def _bounds(self, slot: int, dp_rank: int) -> tuple[int, int]:
        assert 0 <= slot < self.num_slots and 0 <= dp_rank < self.dp_size, (slot, dp_rank)
        number = slot * self.dp_size + dp_rank
        return self.ends[number - 1] if number else 0, self.ends[number]


def _stage_order(actions: Iterable[str]) -> list[str]:
    """The text of an action list's computations, up to the stage."""
    return [action.partition(" m")[0] for action in actions if action.startswith(("F ", "B "))]
