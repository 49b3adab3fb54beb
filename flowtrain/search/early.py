"""Action lists of 1F1B in which the first rank encodes images of later microbatches while it waits for gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

from flowtrain.costs.flops import FloatArray, IntArray
from flowtrain.pipeline.actions import Action, ActionKind, Schedule, StageModule, shared_action
from flowtrain.pipeline.partition import Partition
from flowtrain.pipeline.schedules.build import build_schedule
from flowtrain.pipeline.transfers import insert_transfers
from flowtrain.search.one_f_one_b import IN_TIME
from flowtrain.search.works import SlotTimes

_LEAST_S = 1e-9
"""Durations that order transfers are above 0."""


def early_schedule(partition: Partition, order: IntArray, early: Sequence[int], times: SlotTimes) -> Schedule:
    """Return the lists of one replica's ranks; their memory strategies are left open.

    order: slot of each microbatch. early: of each microbatch, as ``step_s`` gives it.
    """
    slots = order.tolist()
    ranks = {stage.index: stage.rank for stage in partition.of_module(StageModule.BACKBONE)}
    seconds = {kind: each.tolist() for kind, each in _of_kinds(times).items()}
    encode = times.encode.tolist()

    def duration(action: Action) -> float:
        slot = slots[action.microbatch]
        if action.module is StageModule.ENCODER:
            return max(encode[slot], _LEAST_S)
        return max(seconds[action.kind][ranks[action.stage]][slot], _LEAST_S)

    first, *others = _computations(partition, len(slots))
    return insert_transfers(
        [_with_early(first, early), *others],
        training=True,
        num_microbatches=len(slots),
        frozen=partition.frozen,
        duration=duration,
    )


def _of_kinds(times: SlotTimes) -> dict[ActionKind, FloatArray]:
    return {ActionKind.FORWARD_STAGE: times.forward, ActionKind.BACKWARD_STAGE: times.backward}


def _with_early(actions: Sequence[Action], early: Sequence[int]) -> list[Action]:
    """The first rank's computations, with each forward of the encoder at its place."""
    encodes = {action.microbatch: action for action in actions if action.module is StageModule.ENCODER}
    before: defaultdict[int, list[Action]] = defaultdict(list)
    for microbatch, number in enumerate(early):
        before[number].append(encodes[microbatch])
    found: list[Action] = []
    for number, action in enumerate(each for each in actions if each.module is StageModule.BACKBONE):
        found += before.get(number, [])
        if action.kind is ActionKind.FORWARD_STAGE and early[action.microbatch] == IN_TIME:
            found.append(encodes[action.microbatch])
        found.append(action)
    return found


@lru_cache(maxsize=64)
def _computations(partition: Partition, num_microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """What each rank computes under 1F1B."""
    lists = build_schedule("1f1b", partition, num_microbatches=num_microbatches, training=True)
    return tuple(tuple(_without_memory(each) for each in actions if each.kind.is_compute) for actions in lists)


def _without_memory(action: Action) -> Action:
    return shared_action(action.kind, action.stage, action.microbatch, segment=action.segment, module=action.module)
