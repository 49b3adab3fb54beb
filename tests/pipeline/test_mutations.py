"""Randomly changed lists: those that pass compute the same and do not hang; those refused for a circle do hang."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.errors import ScheduleError
from flowtrain.pipeline.actions import Action, ActionKind, MemoryStrategy, Payload, StageModule
from flowtrain.pipeline.schedules.one_f_one_b import one_f_one_b
from flowtrain.pipeline.validate import validate
from tests.pipeline.partitions import ANY_PARTITION, even
from tests.pipeline.random_schedules import random_schedule, shuffled
from tests.pipeline.scalar_pipeline import HangError, pipeline_gradients, plain_gradients

Lists = list[list[Action]]


def pick(random: Random, lists: Lists, wanted: Callable[[Action], bool] = lambda _: True) -> tuple[int, int] | None:
    places = [(r, i) for r, actions in enumerate(lists) for i, action in enumerate(actions) if wanted(action)]
    return random.choice(places) if places else None


def drop(random: Random, lists: Lists) -> bool:
    rank, index = pick(random, lists)
    del lists[rank][index]
    return True


def duplicate(random: Random, lists: Lists) -> bool:
    rank, index = pick(random, lists)
    lists[rank].insert(random.randint(0, len(lists[rank])), lists[rank][index])
    return True


def retarget(random: Random, lists: Lists) -> bool:
    """A transfer with another peer, which may not exist."""
    place = pick(random, lists, lambda action: not action.kind.is_compute)
    if place is None:
        return False
    rank, index = place
    action = lists[rank][index]
    peer = random.choice([each for each in range(len(lists) + 1) if each != action.peer])
    lists[rank][index] = replace(action, peer=peer)
    return True


def relabel(random: Random, lists: Lists) -> bool:
    """Another microbatch, stage, segment, part, payload, kind or memory strategy."""
    rank, index = pick(random, lists)
    action = lists[rank][index]
    changes = [
        {"microbatch": action.microbatch + 1},
        {"stage": action.stage + 1},
        {"segment": action.segment + 1},
        {"sub_microbatch": 1 if action.sub_microbatch is None else None},
        {"module": next(module for module in StageModule if module is not action.module)},
    ]
    if action.kind.is_compute:
        other = next(s for s in (MemoryStrategy.KEEP, MemoryStrategy.SELECTIVE) if s != action.memory)
        # Without a backward, as of a frozen stage, any strategy is right.
        alike = [replace(each, kind=action.kind) for each in lists[rank] if each.kind.is_compute and each is not action]
        changes += [{"memory": other}] if action in alike else []
    else:
        changes += [{"payload": next(payload for payload in Payload if payload is not action.payload)}]
        changes += [{"kind": random.choice([k for k in ActionKind if not k.is_compute and k is not action.kind])}]
    lists[rank][index] = replace(action, **random.choice(changes))
    return True


def move_to_another_rank(random: Random, lists: Lists) -> bool:
    if len(lists) == 1:
        return False
    rank, index = pick(random, lists)
    other = random.choice([each for each in range(len(lists)) if each != rank])
    lists[other].insert(random.randint(0, len(lists[other])), lists[rank].pop(index))
    return True


@pytest.mark.parametrize("mutate", [drop, duplicate, retarget, relabel, move_to_another_rank])
@given(
    random=st.randoms(use_true_random=False),
    partition=ANY_PARTITION,
    num_microbatches=st.integers(1, 5),
)
def test_a_list_with_a_wrong_action_is_refused(mutate, random, partition, num_microbatches):
    if random.random() < 0.5:
        lists = one_f_one_b(partition, num_microbatches)
    else:
        if not partition.of_module(StageModule.ENCODER):
            partition = shuffled(random, partition.pp_size, partition.num_segments)
        parts = [random.randint(1, 2) for _ in range(num_microbatches)]
        lists = random_schedule(random, partition, parts, join_at=random.randint(0, len(partition.stages)))
    mutated = [list(actions) for actions in lists]
    if mutate(random, mutated):
        with pytest.raises(ScheduleError):
            # Lists without any action of an encoder are right if there is none.
            expected = partition if partition.of_module(StageModule.ENCODER) else None
            validate(mutated, training=True, num_microbatches=num_microbatches, partition=expected)


@given(st.randoms(use_true_random=False), st.integers(1, 3), st.integers(1, 2), st.integers(1, 4), st.integers(1, 6))
def test_a_list_in_another_order_is_refused_or_computes_the_same(random, pp_size, chunks, num_microbatches, num_swaps):
    lists = [list(actions) for actions in one_f_one_b(even(pp_size, chunks), num_microbatches)]
    for _ in range(num_swaps):
        actions = random.choice(lists)
        first = random.randrange(len(actions))
        second = min(first + random.choice([1, 1, 1, 2, 5]), len(actions) - 1)
        actions[first], actions[second] = actions[second], actions[first]
    try:
        validate(lists, training=True, num_microbatches=num_microbatches)
    except ScheduleError:
        return
    assert_computes(lists, num_microbatches)


@given(st.randoms(use_true_random=False), st.integers(2, 4), st.integers(1, 2), st.integers(1, 4), st.integers(0, 40))
def test_transfers_at_other_times_compute_the_same_or_hang_where_a_circle_is_found(
    random, pp_size, chunks, num_microbatches, num_swaps
):
    """Each rank's list is right alone; only the combination of ranks can be wrong."""
    lists = [list(actions) for actions in one_f_one_b(even(pp_size, chunks), num_microbatches)]
    for _ in range(num_swaps):
        actions = random.choice(lists)
        first = random.randrange(len(actions) - 1)
        if are_independent(actions[first], actions[first + 1]):
            actions[first : first + 2] = reversed(actions[first : first + 2])
    try:
        validate(lists, training=True, num_microbatches=num_microbatches)
    except ScheduleError as error:
        why = str(error).splitlines()[0]
        assert "in a circle" in why or "match in the order" in why
        if "in a circle" in why:
            with pytest.raises(HangError):
                assert_computes(lists, num_microbatches)
    else:
        assert_computes(lists, num_microbatches)


def are_independent(first: Action, second: Action) -> bool:
    if first.kind.is_compute or second.kind.is_compute:
        return first.kind.is_compute != second.kind.is_compute and first.microbatch != second.microbatch
    return first.launch != second.launch


def assert_computes(lists: Lists, num_microbatches: int) -> None:
    num_stages = 1 + max(action.stage for actions in lists for action in actions)
    weights = [2 - stage for stage in range(num_stages)]
    microbatches = [[k + 1, k - 1] for k in range(num_microbatches)]
    assert pipeline_gradients(lists, weights, microbatches) == plain_gradients(weights, microbatches)
