"""Reads action lists into operations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flowtrain.pipeline.actions import Action, ActionKind, Payload, Schedule, StageModule
from flowtrain.pipeline.dataflow import WHOLE
from flowtrain.pipeline.partition import Partition
from flowtrain.simulator.listed_ops import FIRST_FORWARD, LAST_BACKWARD, Column, ListedOps
from flowtrain.simulator.program import Group, Meets, Op, Program


def program_of(lists: Schedule, partition: Partition, meets: Meets | None = None) -> Program:
    """Return the program of one replica's lists; arguments are those of ``ops_of``."""
    return ops_of(lists, partition, meets).program()


def ops_of(lists: Schedule, partition: Partition, meets: Meets | None = None) -> ListedOps:
    """Return the operations of one replica's lists, which must be valid (``pipeline.validate``).

    A rank fetches microbatch k right before its first action of k or a later one, or before the launches that form one
    group with it, as the executor does. meets: with other replicas; None for one replica.
    """
    reader = _Reader(partition, meets)
    ranks = [reader.rows_of(actions) for actions in lists]
    rows = np.array([row for each in ranks for row in each], dtype=np.int64).reshape(-1, len(Column))
    return ListedOps(np.cumsum([0, *map(len, ranks)]), rows)


class _Reader:
    """Reads one replica's lists, rank by rank."""

    def __init__(self, partition: Partition, meets: Meets | None) -> None:
        self._places = {(stage.module, stage.index): place for place, stage in enumerate(partition.stages)}
        self._meets = meets
        # Each replica has a frozen encoder whole: nothing of it is gathered.
        self._whole = {
            place
            for place, stage in enumerate(partition.stages)
            if stage.module is StageModule.ENCODER and not stage.has_backward
        }

    def rows_of(self, actions: Sequence[Action]) -> list[tuple[int, ...]]:
        """Return the operations of one rank, as ``Column`` names them."""
        rows: list[tuple[int, ...]] = []
        last = {self._place(each): at for at, each in enumerate(actions) if each.kind is ActionKind.BACKWARD_STAGE}
        num_fetched, begun = 0, set[int]()
        for at, action in enumerate(actions):
            for number in range(num_fetched, _needed(actions, at) + 1):
                rows.append((Op.FETCH, 0, 0, number, WHOLE, 0, 0))
                num_fetched = number + 1
            if action.kind.is_compute:
                place = self._place(action)
                rows += self._computation(action, place, is_first=place not in begun, is_last=last.get(place) == at)
                begun.add(place)
            else:
                rows.append(self._transfer(action))
        return rows

    def _place(self, action: Action) -> int:
        return self._places[action.module, action.stage]

    def _transfer(self, action: Action) -> tuple[int, ...]:
        is_gradient, place = action.payload is Payload.GRADIENT, self._place(action)
        if not action.kind.is_sending:
            place += 1 if is_gradient else -1
        assert action.peer is not None
        return _OPS[action.kind], is_gradient, place, action.microbatch, _part(action), action.peer, 0

    def _computation(self, action: Action, place: int, *, is_first: bool, is_last: bool) -> list[tuple[int, ...]]:
        """A computation, with what its rank meets others for before and after it."""
        is_backward = action.kind is ActionKind.BACKWARD_STAGE
        key = (is_backward, place, action.microbatch, _part(action))
        ends = LAST_BACKWARD if is_last else FIRST_FORWARD if is_first and not is_backward else 0
        meets, rows = self._meets if place not in self._whole else None, list[tuple[int, ...]]()
        if meets is not None and (meets.gathers == "each" or (meets.gathers == "once" and is_first)):
            rows.append((Op.MEET, *key, Group.SHARDS, 0))
        rows.append((Op.COMPUTE, *key, 0, ends))
        if meets is not None and (is_last or (is_backward and meets.reduces_each)):
            rows.append((Op.MEET, *key, Group.REPLICAS if is_last else Group.SHARDS, 0))
        return rows


def _needed(actions: Sequence[Action], at: int) -> int:
    """The latest microbatch of an action, or of the group of launches that it begins."""
    latest = actions[at].microbatch
    if not actions[at].kind.is_launch or (at and actions[at - 1].kind.is_launch):
        return latest
    end = at + 1
    while end < len(actions) and actions[end].kind.is_launch:
        latest, end = max(latest, actions[end].microbatch), end + 1
    return latest


_OPS = {
    ActionKind.ISEND: Op.ISEND,
    ActionKind.IRECV: Op.IRECV,
    ActionKind.WAIT_ISEND: Op.WAIT_ISEND,
    ActionKind.WAIT_IRECV: Op.WAIT_IRECV,
}


def _part(action: Action) -> int:
    return WHOLE if action.sub_microbatch is None else action.sub_microbatch
