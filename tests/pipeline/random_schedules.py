"""Random legal schedules: any order in which all ranks can run, with random stage placement and microbatch cuts."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from flowtrain.errors import ScheduleError
from flowtrain.pipeline.actions import Action, ActionKind, MemoryKind, MemoryStrategy, Schedule, StageModule
from flowtrain.pipeline.partition import Partition, Stage
from flowtrain.pipeline.transfers import insert_transfers
from flowtrain.pipeline.validate import validate

STRATEGIES = (
    MemoryStrategy.KEEP,
    MemoryStrategy.RECOMPUTE,
    MemoryStrategy.SELECTIVE,
    MemoryStrategy(MemoryKind.RECOMPUTE, 2),
    MemoryStrategy.OFFLOAD,
)

_Done = tuple[ActionKind, int, int, int | None]
"""Kind, position of the stage, microbatch and part of a computation."""


def shuffled(random: Random, pp_size: int, chunks: int) -> Partition:
    """A backbone of which each segment's stages lie on the ranks in a random order."""
    stages: list[Stage] = []
    for segment in range(chunks):
        for rank in random.sample(range(pp_size), pp_size):
            index = len(stages)
            stages.append(Stage(StageModule.BACKBONE, index, rank, segment, range(2 * index, 2 * index + 2)))
    return Partition(tuple(stages))


def random_schedule(
    random: Random, partition: Partition, num_parts: Sequence[int], *, join_at: int = 0, training: bool = True
) -> Schedule:
    """Lists of a random order that can run.

    num_parts: number of sub-microbatches of each microbatch in the stages before position ``join_at``; from that stage
    on it runs whole. 1: it is always whole.
    """
    stages = partition.stages
    orders: list[list[Action]] = [[] for _ in range(partition.pp_size)]
    waiting = _computations(random, stages, num_parts, join_at, training)
    done: set[_Done] = set()
    while waiting:
        action = random.choice([action for action, (_, needs) in waiting.items() if needs <= done])
        position, _ = waiting.pop(action)
        done.add((action.kind, position, action.microbatch, action.sub_microbatch))
        orders[stages[position].rank].append(action)
    durations = {kind: random.choice([0.5, 1.0, 3.0]) for kind in ActionKind}
    return insert_transfers(
        orders,
        training=training,
        num_microbatches=len(num_parts),
        frozen=partition.frozen,
        duration=lambda action: durations[action.kind] * (1 + action.microbatch % 3),
    )


def shuffle_legally(
    random: Random, lists: Schedule, partition: Partition, num_microbatches: int, num_tries: int
) -> Schedule:
    """Exchange neighbours in training lists at random, keeping the exchanges that the validator accepts."""
    for _ in range(num_tries):
        rank = random.randrange(len(lists))
        actions = list(lists[rank])
        if len(actions) < 2:
            continue
        first = random.randrange(len(actions) - 1)
        actions[first : first + 2] = reversed(actions[first : first + 2])
        changed = (*lists[:rank], tuple(actions), *lists[rank + 1 :])
        try:
            validate(changed, training=True, num_microbatches=num_microbatches, partition=partition)
        except ScheduleError:
            continue
        lists = changed
    return lists


def _computations(
    random: Random, stages: Sequence[Stage], num_parts: Sequence[int], join_at: int, training: bool
) -> dict[Action, tuple[int, set[_Done]]]:
    """Every computation with its position in the flow and the computations that it needs."""
    forward, backward = ActionKind.FORWARD_STAGE, ActionKind.BACKWARD_STAGE

    def parts(position: int, k: int) -> list[int | None]:
        return [None] if position >= join_at or num_parts[k] == 1 else list(range(num_parts[k]))

    needs: dict[Action, tuple[int, set[_Done]]] = {}
    for at, stage in enumerate(stages):
        for k in range(len(num_parts)):
            memory = random.choice(STRATEGIES)
            for part in parts(at, k):
                place = {"module": stage.module, "sub_microbatch": part, "memory": memory}
                before = parts(at - 1, k) if at else []
                inputs: set[_Done] = {(forward, at - 1, k, part if part in before else each) for each in before}
                needs[Action(forward, stage.index, k, stage.segment, **place)] = at, inputs
                if not training or not stage.has_backward:
                    continue
                inputs = {(forward, at, k, part)}
                if at + 1 < len(stages):
                    inputs.add((backward, at + 1, k, part if part in parts(at + 1, k) else None))
                needs[Action(backward, stage.index, k, stage.segment, **place)] = at, inputs
    return needs
