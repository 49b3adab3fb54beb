"""What the engine runs: operations of ranks as arrays, of one replica or of all replicas side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from flowtrain.costs.flops import IntArray

BoolArray = NDArray[np.bool_]


class Op(IntEnum):
    """What an operation does; the first five are actions of the schedule IR."""

    COMPUTE = 0
    ISEND = 1
    IRECV = 2
    WAIT_ISEND = 3
    WAIT_IRECV = 4
    MEET = 5
    """Ranks of a group wait for each other: a collective of theirs starts."""
    FETCH = 6
    """The microbatch's data must be there."""


class Group(IntEnum):
    """Which ranks meet."""

    SHARDS = 0
    """Replicas that share one set of shards."""
    REPLICAS = 1
    """All replicas."""


@dataclass(frozen=True, slots=True)
class Meets:
    """When data parallel ranks of a stage wait for each other.

    gathers: before each forward and backward (``each``), before a stage's first forward (``once``), or never.
    reduces_each: after each backward; otherwise after a stage's last one.
    """

    gathers: str = "never"
    reduces_each: bool = False

    def __post_init__(self) -> None:
        assert self.gathers in ("each", "once", "never"), self.gathers


@dataclass(frozen=True, slots=True, eq=False)
class Computations:
    """Columns ``[C]``, in the order of ranks and lists."""

    rank: IntArray
    op: IntArray
    """Its operation."""
    place: IntArray
    """Of its stage, in the order in which a microbatch passes the stages."""
    microbatch: IntArray
    part: IntArray
    """Sub-microbatch, or ``WHOLE``."""
    is_backward: BoolArray
    is_last: BoolArray
    """The last backward of its stage in the list."""
    is_first: BoolArray
    """The first forward of its stage in the list."""
    forward: IntArray
    """For a backward, the computation that it undoes; for a forward itself."""

    def __len__(self) -> int:
        return len(self.rank)


@dataclass(frozen=True, slots=True, eq=False)
class Transfers:
    """Columns ``[X]``; those between two ranks follow each other, in the order of their launches."""

    source: IntArray
    destination: IntArray
    place: IntArray
    """Of the stage that produces the payload."""
    microbatch: IntArray
    part: IntArray
    is_gradient: BoolArray
    lane_start: IntArray
    """First transfer between the same two ranks."""

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True, slots=True, eq=False)
class Fetches:
    """Columns ``[F]``: where each rank needs a microbatch's data first."""

    rank: IntArray
    microbatch: IntArray

    def __len__(self) -> int:
        return len(self.rank)


ColumnsT = TypeVar("ColumnsT", Computations, Transfers, Fetches)


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Operations of ``R`` ranks; in one replica's, a MEET has its ``Group``, in all replicas' the number of a group."""

    first: IntArray
    """First operation of each rank, and their number, ``[R + 1]``."""
    op: NDArray[np.int8]
    """``[N]``."""
    index: IntArray
    """Its computation, transfer, group or fetch, ``[N]``."""
    computations: Computations
    transfers: Transfers
    fetches: Fetches
    group_first: IntArray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    """First of ``members`` of each group, and their number, ``[G + 1]``."""
    members: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Ranks of the groups, one group after another."""
    num_replicas: int = 1

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.first) - 1


def side_by_side(programs: Sequence[Program], shard_size: int = 1) -> Program:
    """Return the operations of all replicas, rank ``d * pp + r`` for rank r of replica d.

    shard_size: replicas that share one set of shards.
    """
    pp, dp = programs[0].num_ranks, len(programs)
    assert all(each.num_ranks == pp for each in programs) and dp % shard_size == 0, (dp, shard_size)
    sets = dp // shard_size
    shards = [[d * pp + r for d in range(s * shard_size, (s + 1) * shard_size)] for r in range(pp) for s in range(sets)]
    replicas = [[d * pp + r for d in range(dp)] for r in range(pp)]
    groups = shards + replicas
    counts = [(len(each.op), len(each.computations), len(each.transfers), len(each.fetches)) for each in programs]
    before = np.cumsum([(0, 0, 0, 0), *counts[:-1]], axis=0).tolist()
    parts = [_shifted(each, d, dp, shard_size, *before[d]) for d, each in enumerate(programs)]
    return Program(
        first=np.concatenate([[0], *(each.first[1:] for each in parts)]),
        op=np.concatenate([each.op for each in parts]),
        index=np.concatenate([each.index for each in parts]),
        computations=_joined(Computations, [each.computations for each in parts]),
        transfers=_joined(Transfers, [each.transfers for each in parts]),
        fetches=_joined(Fetches, [each.fetches for each in parts]),
        group_first=np.cumsum([0, *map(len, groups)]),
        members=np.array([rank for group in groups for rank in group], dtype=np.int64),
        num_replicas=dp,
    )


def _shifted(
    program: Program, replica: int, dp: int, shard_size: int, ops: int, computations: int, transfers: int, fetches: int
) -> Program:
    """A replica's program with the numbers that it has among all; the last four: of those of replicas before it."""
    pp, sets = program.num_ranks, dp // shard_size
    ranks = replica * pp
    rank_of_op = np.repeat(np.arange(pp), np.diff(program.first))
    group = np.where(program.index == Group.SHARDS, rank_of_op * sets + replica // shard_size, pp * sets + rank_of_op)
    kind = program.op
    added = np.select(
        [kind == Op.COMPUTE, kind == Op.FETCH, kind == Op.MEET],
        [computations, fetches, group - program.index],
        transfers,
    )
    own, moved = program.computations, program.transfers
    return Program(
        first=program.first + ops,
        op=kind,
        index=program.index + added,
        computations=replace(own, rank=own.rank + ranks, op=own.op + ops, forward=own.forward + computations),
        transfers=replace(
            moved,
            source=moved.source + ranks,
            destination=moved.destination + ranks,
            lane_start=moved.lane_start + transfers,
        ),
        fetches=replace(program.fetches, rank=program.fetches.rank + ranks),
    )


def _joined(kind: type[ColumnsT], columns: Sequence[ColumnsT]) -> ColumnsT:
    """The columns of several, one after another."""
    names = [each.name for each in fields(kind)]
    return kind(**{name: np.concatenate([getattr(each, name) for each in columns]) for name in names})
