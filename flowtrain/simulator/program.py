"""Action lists as arrays: what the engine runs. First those of one replica, then of all replicas side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from flowtrain.costs.flops import IntArray
from flowtrain.pipeline.actions import Action, ActionKind, Payload, Schedule
from flowtrain.pipeline.dataflow import WHOLE
from flowtrain.pipeline.partition import Partition

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


ALONE: Meets | None = None
"""One replica meets nobody."""


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


def program_of(lists: Schedule, partition: Partition, meets: Meets | None = ALONE) -> Program:
    """Return the operations of one replica's lists, which must be valid (``pipeline.validate``).

    A rank fetches microbatch k right before its first action of k or a later one, as the executor does. meets: with
    other replicas; None for one replica.
    """
    builder = _Builder(partition, lists, meets)
    for rank, actions in enumerate(lists):
        builder.add_rank(rank, actions)
    return builder.build()


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


_Transfer = tuple[bool, int, int, int]  # (is a gradient, place of the producer, microbatch, part)


class _Builder:
    """Collects the operations of one replica."""

    def __init__(self, partition: Partition, lists: Schedule, meets: Meets | None) -> None:
        self._places = {(stage.module, stage.index): place for place, stage in enumerate(partition.stages)}
        self._meets = meets
        self._first = [0]
        self._op: list[int] = []
        self._index: list[int] = []
        self._computations: list[tuple[int, ...]] = []
        self._forwards: dict[tuple[int, int, int], int] = {}
        self._fetches: list[tuple[int, int]] = []
        self._numbers = self._number_transfers(lists)
        self._last_at = self._last_backwards(lists)

    def _number_transfers(self, lists: Schedule) -> dict[_Transfer, int]:
        """Numbers of the transfers, those of a pair of ranks together, in the order of their launches."""
        lanes: defaultdict[tuple[int, int], list[_Transfer]] = defaultdict(list)
        for rank, actions in enumerate(lists):
            for action in actions:
                if action.kind is ActionKind.ISEND:
                    assert action.peer is not None
                    lanes[rank, action.peer].append(self._transfer(action))
        self._lanes = dict(sorted(lanes.items()))
        ordered = [transfer for lane in self._lanes.values() for transfer in lane]
        return {transfer: number for number, transfer in enumerate(ordered)}

    def _last_backwards(self, lists: Schedule) -> set[tuple[int, int]]:
        """(rank, index in its list) of the last backward of each stage."""
        last: dict[int, tuple[int, int]] = {}
        for rank, actions in enumerate(lists):
            for at, action in enumerate(actions):
                if action.kind is ActionKind.BACKWARD_STAGE:
                    last[self._place(action)] = rank, at
        return set(last.values())

    def _place(self, action: Action) -> int:
        return self._places[action.module, action.stage]

    def _transfer(self, action: Action) -> _Transfer:
        is_gradient, place = action.payload is Payload.GRADIENT, self._place(action)
        if not action.kind.is_sending:
            place += 1 if is_gradient else -1
        return is_gradient, place, action.microbatch, _part(action)

    def add_rank(self, rank: int, actions: Sequence[Action]) -> None:
        num_fetched, begun = 0, set[int]()
        for at, action in enumerate(actions):
            while num_fetched <= action.microbatch:
                self._add(Op.FETCH, len(self._fetches))
                self._fetches.append((rank, num_fetched))
                num_fetched += 1
            if action.kind.is_compute:
                self._add_computation(rank, action, (rank, at) in self._last_at, begun)
            else:
                self._add(_OPS[action.kind], self._numbers[self._transfer(action)])
        self._first.append(len(self._op))

    def _add_computation(self, rank: int, action: Action, is_last: bool, begun: set[int]) -> None:
        place, is_backward = self._place(action), action.kind is ActionKind.BACKWARD_STAGE
        is_first = place not in begun
        begun.add(place)
        meets, number = self._meets, len(self._computations)
        if meets is not None and (meets.gathers == "each" or (meets.gathers == "once" and is_first)):
            self._add(Op.MEET, Group.SHARDS)
        key = place, action.microbatch, _part(action)
        forward = self._forwards.pop(key) if is_backward else self._forwards.setdefault(key, number)
        columns = (rank, len(self._op), *key, is_backward, is_last, is_first and not is_backward, forward)
        self._add(Op.COMPUTE, number)
        self._computations.append(columns)
        if meets is not None and is_last:
            self._add(Op.MEET, Group.REPLICAS)
        elif meets is not None and is_backward and meets.reduces_each:
            self._add(Op.MEET, Group.SHARDS)

    def _add(self, op: Op, index: int) -> None:
        self._op.append(op)
        self._index.append(index)

    def build(self) -> Program:
        rank, op, place, microbatch, part, is_backward, is_last, is_first, forward = _columns(self._computations, 9)
        return Program(
            first=np.array(self._first),
            op=np.array(self._op, dtype=np.int8),
            index=np.array(self._index, dtype=np.int64),
            computations=Computations(
                rank, op, place, microbatch, part, is_backward > 0, is_last > 0, is_first > 0, forward
            ),
            transfers=self._transfers(),
            fetches=Fetches(*_columns(self._fetches, 2)),
        )

    def _transfers(self) -> Transfers:
        rows, start = [], 0
        for (source, destination), lane in self._lanes.items():
            for is_gradient, place, microbatch, part in lane:
                rows.append((source, destination, place, microbatch, part, is_gradient, start))
            start += len(lane)
        source, destination, place, microbatch, part, is_gradient, lane_start = _columns(rows, 7)
        return Transfers(source, destination, place, microbatch, part, is_gradient > 0, lane_start)


_OPS = {
    ActionKind.ISEND: Op.ISEND,
    ActionKind.IRECV: Op.IRECV,
    ActionKind.WAIT_ISEND: Op.WAIT_ISEND,
    ActionKind.WAIT_IRECV: Op.WAIT_IRECV,
}


def _part(action: Action) -> int:
    return WHOLE if action.sub_microbatch is None else action.sub_microbatch


def _columns(rows: Sequence[tuple[int, ...]], width: int) -> list[IntArray]:
    return list(np.array(rows, dtype=np.int64).reshape(len(rows), width).T.copy())
