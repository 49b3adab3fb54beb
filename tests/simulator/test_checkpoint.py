"""Saved states: what goes on from one gives the times of a new run, whatever the lists do after it."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.pipeline.schedules.one_f_one_b import one_f_one_b
from flowtrain.simulator.engine import Timeline
from flowtrain.simulator.lists import program_of
from flowtrain.simulator.program import Meets, Program, side_by_side
from tests.pipeline.partitions import ANY_PARTITION, even
from tests.pipeline.random_schedules import random_schedule, shuffle_legally

SEEDS = st.integers(0, 2**32 - 1)


def times_of(program: Program) -> tuple[np.ndarray, np.ndarray]:
    """Whole seconds that depend on what is computed and sent alone, so that they are the same in any order."""
    done, moved = program.computations, program.transfers
    seconds = 1 + (3 * done.place + 5 * done.microbatch + 2 * done.is_backward + done.part + 1) % 7
    return seconds.astype(float), ((moved.place + moved.microbatch + moved.is_gradient) % 4).astype(float)


@settings(max_examples=80, deadline=None)
@given(
    seed=SEEDS,
    partition=ANY_PARTITION,
    count=st.integers(1, 5),
    num_saves=st.integers(1, 16),
    buffered=st.booleans(),
    dp=st.integers(1, 2),
)
def test_other_lists_go_on_from_what_they_share(seed, partition, count, num_saves, buffered, dp):
    random = Random(seed)
    lists = random_schedule(random, partition, [1] * count)
    others = shuffle_legally(random, lists, partition, count, random.randint(0, 12))
    meets = Meets("each", reduces_each=True) if dp > 1 else None
    program, other = (
        side_by_side([program_of(each, partition, meets)] * dp, [dp]) if dp > 1 else program_of(each, partition)
        for each in (lists, others)
    )
    begin = np.array([float(random.randint(0, 5)) for _ in range(program.num_ranks)])
    late = np.array([float(random.randint(0, 9)) for _ in range(count)])
    ready, others_ready = late[program.fetches.microbatch], late[other.fetches.microbatch]
    parent = Timeline(program, *times_of(program), ready_s=ready, begin_s=begin, buffered=buffered, num_saves=num_saves)
    child = parent.of_others(other, *times_of(other), ready_s=others_ready)
    anew = Timeline(other, *times_of(other), ready_s=others_ready, begin_s=begin, buffered=buffered)
    np.testing.assert_array_equal(child.starts, anew.starts)
    np.testing.assert_array_equal(child.ends, anew.ends)
    # And a child of the child, back to the first lists.
    back = child.of_others(program, *times_of(program), ready_s=ready)
    np.testing.assert_array_equal(back.ends, parent.ends)


def test_a_saved_state_stays_as_it_was_when_its_timeline_changes():
    partition = even(4)
    program = program_of(one_f_one_b(partition, 8), partition)
    seconds, transfers = times_of(program)
    timeline = Timeline(program, seconds, transfers, num_saves=16)
    saved, ends = timeline.save(), timeline.ends.copy()
    timeline.change(np.array([0]), np.array([50.0]))
    assert timeline.makespan_s > ends.max()
    again = Timeline(program, seconds, transfers, resume=saved)
    np.testing.assert_array_equal(again.ends, ends)
    assert saved.num_ops.sum() > 0.8 * len(program.op), "the latest of 16 states has nearly all operations"


def test_what_parts_late_is_timed_from_late_on():
    partition = even(4)
    lists = one_f_one_b(partition, 16)
    program = program_of(lists, partition)
    parent = Timeline(program, *times_of(program), num_saves=16)
    longer = program_of(one_f_one_b(partition, 17), partition)  # alike until the drain
    shared = parent.save(np.minimum(np.diff(program.first), np.diff(longer.first)))
    assert shared.num_ops.sum() > 0.8 * len(program.op)
    child = parent.of_others(longer, *times_of(longer))
    np.testing.assert_array_equal(child.ends, Timeline(longer, *times_of(longer)).ends)
