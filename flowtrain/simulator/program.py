"""What the engine runs: operations of ranks as arrays, of one replica or of all replicas side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from flowtrain.costs.flops import FloatArray, IntArray

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


@dataclass(frozen=True, eq=False)
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
    stands_for: IntArray = field(default_factory=lambda: np.ones(1, dtype=np.int64))
    """Replicas of the run that are like each replica, ``[num_replicas]``; only different ones are timed."""

    @cached_property
    def first_backwards(self) -> BoolArray:
        """Whether a computation is the first backward of its stage in its rank's list, ``[C]``."""
        columns = self.computations
        backwards = np.flatnonzero(columns.is_backward)
        is_first = np.zeros(len(columns), dtype=np.bool_)
        if len(backwards):
            stage = columns.rank[backwards] * (columns.place.max() + 1) + columns.place[backwards]
            is_first[backwards[np.unique(stage, return_index=True)[1]]] = True
        return is_first

    def mean(self, values: FloatArray) -> float:
        """Return the mean over the run's ranks of values ``[R]``."""
        return float(np.average(values.reshape(self.num_replicas, -1).mean(axis=1), weights=self.stands_for))

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.first) - 1

    @cached_property
    def fetch_ops(self) -> IntArray:
        """The operation of each fetch, ``[F]``."""
        found, ops = np.empty(len(self.fetches), dtype=np.int64), np.flatnonzero(self.op == Op.FETCH)
        found[self.index[ops]] = ops
        return found

    def find(
        self,
        rank: IntArray,
        place: IntArray,
        microbatch: IntArray,
        part: IntArray,
        is_backward: BoolArray | bool = False,
    ) -> IntArray:
        """Return the computations of parts of microbatches, or of the whole where the stage runs that; ``[N]``."""
        columns, numbers = self.computations, [rank, place, microbatch]
        every = [columns.rank, columns.place, columns.microbatch]
        # One number for each, with which a sorted list is searched.
        bases = [
            1 + int(max(each.max(initial=0), asked.max(initial=0))) for each, asked in zip(every, numbers, strict=True)
        ]
        bases += [2 + int(max(columns.part.max(initial=0), part.max(initial=0))), 2]

        def keys(*values: IntArray | BoolArray | bool) -> IntArray:
            at = np.zeros(len(np.atleast_1d(values[0])), dtype=np.int64)
            for value, base in zip(values, bases, strict=True):
                at = at * base + value
            return at

        own = keys(*every, columns.part + 1, columns.is_backward)
        sorted_by = np.argsort(own)
        known = own[sorted_by]
        asked, whole = keys(*numbers, part + 1, is_backward), keys(*numbers, np.zeros_like(part), is_backward)
        found = np.minimum(np.searchsorted(known, asked), len(known) - 1)
        is_part = known[found] == asked
        found = np.where(is_part, found, np.minimum(np.searchsorted(known, whole), len(known) - 1))
        assert (known[found] == np.where(is_part, asked, whole)).all(), "computations that the program does not have"
        return np.asarray(sorted_by[found])


def side_by_side(programs: Sequence[Program], set_sizes: Sequence[int], stands_for: IntArray | None = None) -> Program:
    """Return the operations of all replicas, rank ``d * pp + r`` for rank r of replica d.

    set_sizes: how many replicas share each set of shards, one set after another. stands_for: as in ``Program``; None:
    each replica for itself.
    """
    pp, dp = programs[0].num_ranks, len(programs)
    assert all(each.num_ranks == pp for each in programs) and sum(set_sizes) == dp, (dp, set_sizes)
    sets, of_replica = len(set_sizes), np.repeat(np.arange(len(set_sizes)), set_sizes)
    ranks = np.arange(dp)[None, :] * pp + np.arange(pp)[:, None]
    # The replicas of a set of shards, set by set of each pipeline rank; then all replicas of each.
    members = np.concatenate([ranks.reshape(-1), ranks.reshape(-1)])
    sizes = [*set_sizes] * pp + [dp] * pp
    of_op, of_computation, of_transfer, of_fetch = (
        _Numbering.of([count(each) for each in programs])
        for count in (
            lambda each: len(each.op),
            lambda each: len(each.computations),
            lambda each: len(each.transfers),
            lambda each: len(each.fetches),
        )
    )
    op = np.concatenate([each.op for each in programs])
    rank_of_op = np.concatenate([np.repeat(np.arange(pp), np.diff(each.first)) for each in programs])
    index = np.concatenate([each.index for each in programs])
    group = np.where(index == Group.SHARDS, rank_of_op * sets + of_replica[of_op.replica], pp * sets + rank_of_op)
    of_kinds = {Op.COMPUTE: of_computation, Op.FETCH: of_fetch}
    kinds = [*(op == kind for kind in of_kinds), op == Op.MEET]
    numbers = [*(index + each.before[of_op.replica] for each in of_kinds.values()), group]
    computations = _joined(Computations, [each.computations for each in programs])
    transfers = _joined(Transfers, [each.transfers for each in programs])
    fetches = _joined(Fetches, [each.fetches for each in programs])
    return Program(
        first=np.concatenate([[0], *(each.first[1:] + at for each, at in zip(programs, of_op.before, strict=True))]),
        op=op,
        index=np.select(kinds, numbers, index + of_transfer.before[of_op.replica]),
        computations=replace(
            computations,
            rank=computations.rank + pp * of_computation.replica,
            op=computations.op + of_op.before[of_computation.replica],
            forward=computations.forward + of_computation.moved,
        ),
        transfers=replace(
            transfers,
            source=transfers.source + pp * of_transfer.replica,
            destination=transfers.destination + pp * of_transfer.replica,
            lane_start=transfers.lane_start + of_transfer.moved,
        ),
        fetches=replace(fetches, rank=fetches.rank + pp * of_fetch.replica),
        group_first=np.cumsum([0, *sizes]),
        members=members,
        num_replicas=dp,
        stands_for=np.ones(dp, dtype=np.int64) if stands_for is None else stands_for,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Numbering:
    """Numbers of operations, computations or the like over all replicas, one replica after another."""

    before: IntArray
    """Those of earlier replicas, by replica."""
    replica: IntArray
    """Replica of each."""

    @classmethod
    def of(cls, counts: Sequence[int]) -> _Numbering:
        return cls(np.cumsum([0, *counts[:-1]]), np.repeat(np.arange(len(counts)), counts))

    @property
    def moved(self) -> IntArray:
        """What is added to the number of each."""
        return self.before[self.replica]


def _joined(kind: type[ColumnsT], columns: Sequence[ColumnsT]) -> ColumnsT:
    """The columns of several, one after another."""
    names = [each.name for each in fields(kind)]
    return kind(**{name: np.concatenate([getattr(each, name) for each in columns]) for name in names})
