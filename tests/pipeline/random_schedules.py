"""Random legal schedules: any order in which all ranks can run, with random stage placement and microbatch cuts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import product
from random import Random

from flowtrain.errors import ScheduleError
from flowtrain.pipeline.actions import Action, ActionKind, MemoryKind, MemoryStrategy, Schedule, StageModule
from flowtrain.pipeline.partition import Partition
from flowtrain.pipeline.transfers import insert_transfers
from flowtrain.pipeline.validate import validate

STRATEGIES = (
    MemoryStrategy.KEEP,
    MemoryStrategy.RECOMPUTE,
    MemoryStrategy.SELECTIVE,
    MemoryStrategy(MemoryKind.RECOMPUTE, 2),
    MemoryStrategy.OFFLOAD,
)


def stage_ranks(pp_size: int, chunks_per_rank: int, random: Random | None = None) -> list[int]:
    """The rank of every stage: in the usual order, or with each chunk's stages on the ranks in a random order."""
    ranks: list[int] = []
    for _ in range(chunks_per_rank):
        chunk = list(range(pp_size))
        if random is not None:
            random.shuffle(chunk)
        ranks += chunk
    return ranks


def random_schedule(
    random: Random, ranks: Sequence[int], num_parts: Sequence[int], *, join_stage: int = 0, training: bool = True
) -> Schedule:
    """Lists of a random order that can run.

    ranks: rank of every stage. num_parts: number of sub-microbatches of each microbatch before ``join_stage``; from
    that stage on it runs whole. 1: it is always whole.
    """
    pp_size = max(ranks) + 1
    orders: list[list[Action]] = [[] for _ in range(pp_size)]
    waiting = _computations(random, ranks, num_parts, join_stage, training, pp_size)
    done: set[tuple[ActionKind, int, int, int | None]] = set()
    while waiting:
        ready = [action for action, needs in waiting.items() if needs <= done]
        action = random.choice(ready)
        del waiting[action]
        done.add((action.kind, action.stage, action.microbatch, action.sub_microbatch))
        orders[ranks[action.stage]].append(action)
    durations = {kind: random.choice([0.5, 1.0, 3.0]) for kind in ActionKind}
    return insert_transfers(
        orders,
        training=training,
        num_microbatches=len(num_parts),
        duration=lambda action: durations[action.kind] * (1 + action.microbatch % 3),
    )


def random_lists(random: Random, partition: Partition, num_microbatches: int) -> Schedule:
    """Lists of a random order over the stages of a partition; microbatches join from parts somewhere in the encoder."""
    stages = partition.stages
    join, parts = random.randint(0, len(partition.of_module(StageModule.ENCODER))), Counter[int]()
    for k in range(num_microbatches):
        parts[k] = random.randint(1, 3)

    def names(place: int, k: int) -> list[int | None]:
        return [None] if place >= join or parts[k] == 1 else list(range(parts[k]))

    waiting: dict[tuple[bool, int, int, int | None], tuple[Action, set[tuple[bool, int, int, int | None]]]] = {}
    for (place, stage), k in product(enumerate(stages), range(num_microbatches)):
        before = names(place - 1, k) if place else []
        for part in names(place, k):
            memory = random.choice(STRATEGIES) if stage.has_backward else MemoryStrategy.KEEP
            forward = Action(ActionKind.FORWARD_STAGE, stage.index, k, stage.segment, stage.module, part, memory)
            needs = {(False, place - 1, k, each) for each in ([part] if part in before else before)}
            waiting[False, place, k, part] = forward, needs
            if stage.has_backward:
                needs = {(False, place, k, part)}
                if place + 1 < len(stages):
                    needs.add((True, place + 1, k, part if part in names(place + 1, k) else None))
                waiting[True, place, k, part] = replace(forward, kind=ActionKind.BACKWARD_STAGE), needs
    orders: list[list[Action]] = [[] for _ in range(partition.pp_size)]
    done: set[tuple[bool, int, int, int | None]] = set()
    while waiting:
        work = random.choice([work for work, (_, needs) in waiting.items() if needs <= done])
        orders[stages[work[1]].rank].append(waiting.pop(work)[0])
        done.add(work)
    return insert_transfers(orders, training=True, num_microbatches=num_microbatches, frozen=partition.frozen)


def shuffle_legally(
    random: Random, lists: Schedule, num_microbatches: int, num_tries: int, frozen: Collection[StageModule] = ()
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
            validate(changed, training=True, num_microbatches=num_microbatches, frozen=frozen)
        except ScheduleError:
            continue
        lists = changed
    return lists


def _computations(
    random: Random, ranks: Sequence[int], num_parts: Sequence[int], join_stage: int, training: bool, pp_size: int
) -> dict[Action, set[tuple[ActionKind, int, int, int | None]]]:
    """Every computation with the computations that it needs."""
    forward, backward = ActionKind.FORWARD_STAGE, ActionKind.BACKWARD_STAGE

    def parts(stage: int, k: int) -> list[int | None]:
        return [None] if stage >= join_stage or num_parts[k] == 1 else list(range(num_parts[k]))

    needs: dict[Action, set[tuple[ActionKind, int, int, int | None]]] = {}
    for stage in range(len(ranks)):
        for k in range(len(num_parts)):
            memory = random.choice(STRATEGIES)
            for part in parts(stage, k):
                action = Action(forward, stage, k, stage // pp_size, sub_microbatch=part, memory=memory)
                before = parts(stage - 1, k) if stage else []
                needs[action] = {(forward, stage - 1, k, part if part in before else each) for each in before}
                if training:
                    action = Action(backward, stage, k, stage // pp_size, sub_microbatch=part, memory=memory)
                    needs[action] = {(forward, stage, k, part)}
                    if stage + 1 < len(ranks):
                        after = parts(stage + 1, k)
                        needs[action].add((backward, stage + 1, k, part if part in after else None))
    return needs
