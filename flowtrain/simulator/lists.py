"""Reads action lists into arrays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from flowtrain.costs.flops import IntArray
from flowtrain.pipeline.actions import Action, ActionKind, Payload, Schedule, StageModule
from flowtrain.pipeline.dataflow import WHOLE
from flowtrain.pipeline.partition import Partition
from flowtrain.simulator.program import Computations, Fetches, Group, Meets, Op, Program, Transfers


def program_of(lists: Schedule, partition: Partition, meets: Meets | None = None) -> Program:
    """Return the operations of one replica's lists, which must be valid (``pipeline.validate``).

    A rank fetches microbatch k right before its first action of k or a later one, or before the launches that form one
    group with it, as the executor does. meets: with
    other replicas; None for one replica.
    """
    builder = _Builder(partition, lists, meets)
    for rank, actions in enumerate(lists):
        builder.add_rank(rank, actions)
    return builder.build()


_Transfer = tuple[bool, int, int, int]  # (is a gradient, place of the producer, microbatch, part)


class _Builder:
    """Collects the operations of one replica."""

    def __init__(self, partition: Partition, lists: Schedule, meets: Meets | None) -> None:
        self._places = {(stage.module, stage.index): place for place, stage in enumerate(partition.stages)}
        self._meets = meets
        # Each replica has a frozen encoder whole: nothing of it is gathered.
        self._whole = {
            place
            for place, stage in enumerate(partition.stages)
            if stage.module is StageModule.ENCODER and not stage.has_backward
        }
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
            for number in range(num_fetched, self._needed(actions, at) + 1):
                self._add(Op.FETCH, len(self._fetches))
                self._fetches.append((rank, number))
                num_fetched = number + 1
            if action.kind.is_compute:
                self._add_computation(rank, action, (rank, at) in self._last_at, begun)
            else:
                self._add(_OPS[action.kind], self._numbers[self._transfer(action)])
        self._first.append(len(self._op))

    def _needed(self, actions: Sequence[Action], at: int) -> int:
        """The latest microbatch of an action, or of the group of launches that it begins."""
        latest = actions[at].microbatch
        if not actions[at].kind.is_launch or (at and actions[at - 1].kind.is_launch):
            return latest
        end = at + 1
        while end < len(actions) and actions[end].kind.is_launch:
            latest, end = max(latest, actions[end].microbatch), end + 1
        return latest

    def _add_computation(self, rank: int, action: Action, is_last: bool, begun: set[int]) -> None:
        place, is_backward = self._place(action), action.kind is ActionKind.BACKWARD_STAGE
        is_first = place not in begun
        begun.add(place)
        meets, number = self._meets, len(self._computations)
        if place in self._whole:
            meets = None
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
        rows: list[tuple[int, ...]] = []
        start = 0
        for ends, lane in self._lanes.items():
            rows += [(*ends, *transfer[1:], transfer[0], start) for transfer in lane]
            start += len(lane)
        source, destination, place, microbatch, part, gradient, lane_start = _columns(rows, 7)
        return Transfers(source, destination, place, microbatch, part, gradient > 0, lane_start)


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
