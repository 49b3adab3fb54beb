"""The engine: its times equal those of plain rules, for any schedule, and what must hold for all times."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.errors import ScheduleError
from flowtrain.pipeline.actions import Schedule
from flowtrain.pipeline.partition import Partition
from flowtrain.pipeline.schedules.build import build_schedule
from flowtrain.pipeline.schedules.one_f_one_b import one_f_one_b
from flowtrain.simulator.engine import NUM_SAVES, Timeline
from flowtrain.simulator.lists import program_of
from flowtrain.simulator.program import Meets, Op, Program, side_by_side
from tests.pipeline.partitions import ANY_PARTITION, even, parse_actions
from tests.pipeline.random_schedules import random_schedule
from tests.simulator.reference import finish_times

SEEDS = st.integers(0, 2**32 - 1)


def drawn_times(random: Random, program: Program) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of computations and transfers; whole numbers, so that sums are exact."""
    seconds = [float(random.randint(1, 9)) for _ in range(len(program.computations))]
    return np.array(seconds), np.array([float(random.randint(0, 5)) for _ in range(len(program.transfers))])


def of_action(programs: list[Program], lists: list[Schedule], seconds: list[np.ndarray], transfers: list[np.ndarray]):
    """The same times, asked by action: the engine numbers computations and sends in the order of the lists."""
    tables = []
    for program, schedule, computing, sending in zip(programs, lists, seconds, transfers, strict=True):
        table = {}
        for rank, actions in enumerate(schedule):
            span = slice(program.first[rank], program.first[rank + 1])
            kinds, indexes = program.op[span], program.index[span]
            is_timed = np.isin(kinds, [Op.COMPUTE, Op.ISEND])
            timed = [each for each in actions if each.kind.is_compute or each.kind == "isend"]
            for action, kind, index in zip(timed, kinds[is_timed], indexes[is_timed], strict=True):
                table[action] = float(computing[index] if kind == Op.COMPUTE else sending[index])
        tables.append(table)
    return lambda replica, action: tables[replica][action]


@st.composite
def any_schedule(draw: st.DrawFn) -> tuple[Schedule, Partition]:
    random, partition = Random(draw(SEEDS)), draw(ANY_PARTITION)
    parts = [random.choice([1, 1, 2, 3]) for _ in range(draw(st.integers(1, 5)))]
    return random_schedule(random, partition, parts, join_at=random.randint(0, len(partition.stages) - 1)), partition


@given(drawn=any_schedule(), seed=SEEDS, buffered=st.booleans())
def test_any_schedule_takes_what_plain_rules_give(drawn, seed, buffered):
    lists, partition = drawn
    program = program_of(lists, partition)
    seconds, transfers = drawn_times(Random(seed), program)
    timeline = Timeline(program, seconds, transfers, buffered=buffered)
    expected = finish_times([lists], of_action([program], [lists], [seconds], [transfers]), buffered=buffered)
    assert timeline.finish_s.tolist() == expected[0]


@given(
    drawn=any_schedule(),
    seed=SEEDS,
    replicas=st.sampled_from([(2, 2), (3, 3), (4, 2), (2, 1)]),
    gathers=st.sampled_from(["each", "once", "never"]),
    reduces_each=st.booleans(),
)
def test_replicas_meet_at_gathers_and_reductions(drawn, seed, replicas, gathers, reduces_each):
    lists, partition = drawn
    dp, shard_size = replicas
    program, random = program_of(lists, partition, Meets(gathers, reduces_each)), Random(seed)
    times = [drawn_times(random, program) for _ in range(dp)]
    seconds, transfers = [each[0] for each in times], [each[1] for each in times]
    timeline = Timeline(
        side_by_side([program] * dp, [shard_size] * (dp // shard_size)),
        np.concatenate(seconds),
        np.concatenate(transfers),
    )
    asked = of_action([program] * dp, [lists] * dp, seconds, transfers)
    expected = finish_times([lists] * dp, asked, gathers=gathers, reduces_each=reduces_each, shard_size=shard_size)
    assert timeline.finish_s.tolist() == [each for replica in expected for each in replica]


@given(drawn=any_schedule(), seed=SEEDS)
def test_data_that_come_late_are_waited_for(drawn, seed):
    lists, partition = drawn
    program, random = program_of(lists, partition), Random(seed)
    seconds, transfers = drawn_times(random, program)
    late = [float(random.randint(0, 40)) for _ in range(1 + int(program.fetches.microbatch.max()))]
    ready = np.array(late)[program.fetches.microbatch]
    timeline = Timeline(program, seconds, transfers, ready_s=ready)
    asked = of_action([program], [lists], [seconds], [transfers])
    assert timeline.finish_s.tolist() == finish_times([lists], asked, ready=lambda _, k: late[k])[0]


@given(drawn=any_schedule(), seed=SEEDS, num_changes=st.integers(1, 6))
def test_timing_again_gives_the_times_of_a_new_run(drawn, seed, num_changes):
    lists, partition = drawn
    program, random = program_of(lists, partition), Random(seed)
    seconds, transfers = drawn_times(random, program)
    timeline = Timeline(program, seconds, transfers, num_saves=random.randint(1, NUM_SAVES))
    for _ in range(num_changes):
        changed = random.sample(range(len(seconds)), random.randint(1, min(3, len(seconds))))
        seconds[changed] = [float(random.randint(1, 20)) for _ in changed]
        timeline.change(np.array(changed), seconds[changed])
        anew = Timeline(program, seconds, transfers)
        np.testing.assert_array_equal(timeline.ends, anew.ends)
        np.testing.assert_array_equal(timeline.starts, anew.starts)
        assert timeline.finish_s.tolist() == anew.finish_s.tolist()


@given(drawn=any_schedule(), seed=SEEDS, buffered=st.booleans())
def test_what_holds_for_all_times(drawn, seed, buffered):
    lists, partition = drawn
    program, random = program_of(lists, partition), Random(seed)
    seconds, transfers = drawn_times(random, program)
    timeline = Timeline(program, seconds, transfers, buffered=buffered)
    columns = program.computations
    assert timeline.makespan_s >= timeline.busy_s.max()
    # A microbatch's forwards and backwards follow each other, and so do the transfers between their stages.
    chains = np.zeros(1 + int(columns.microbatch.max()))
    whole = columns.part < 0
    np.add.at(chains, columns.microbatch[whole], seconds[whole])
    assert timeline.makespan_s >= chains.max()
    computing = timeline.ends[columns.op] - timeline.starts[columns.op]
    np.testing.assert_array_equal(computing, seconds)
    for rank in range(program.num_ranks):
        span = slice(program.first[rank], program.first[rank + 1])
        assert (timeline.starts[span][1:] >= timeline.ends[span][:-1]).all()
    less = Timeline(program, seconds, transfers * 0.5, buffered=buffered)
    assert less.makespan_s <= timeline.makespan_s
    shorter = seconds.copy()
    shorter[random.randrange(len(seconds))] *= 0.5
    assert Timeline(program, shorter, transfers, buffered=buffered).makespan_s <= timeline.makespan_s


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("num_microbatches", [4, 9])
def test_even_1f1b_idles_one_slot_for_each_other_stage(pp, num_microbatches):
    lists, partition = one_f_one_b(even(pp), num_microbatches), even(pp)
    program = program_of(lists, partition)
    seconds = np.where(program.computations.is_backward, 2.0, 1.0)
    timeline = Timeline(program, seconds, np.zeros(len(program.transfers)))
    assert timeline.makespan_s == 3.0 * (num_microbatches + pp - 1)


@settings(max_examples=25)
@given(pp=st.integers(2, 4), chunks=st.integers(2, 3), num_microbatches=st.integers(4, 12))
def test_interleaving_idles_a_chunks_share(pp, chunks, num_microbatches):
    partition = even(pp, chunks)
    lists = build_schedule("interleaved_1f1b", partition, num_microbatches=num_microbatches, training=True)
    program = program_of(lists, partition)
    seconds = np.where(program.computations.is_backward, 2.0, 1.0)
    timeline = Timeline(program, seconds, np.zeros(len(program.transfers)))
    bubble = timeline.makespan_s - 3.0 * chunks * num_microbatches
    assert bubble >= 3.0 * (pp - 1) - 1e-9
    if num_microbatches >= pp:
        assert bubble <= 3.0 * (pp - 1) + 3.0 * pp  # the last group's transfers wait for each other a little


def test_a_send_that_nobody_receives_yet_holds_its_rank_without_buffers():
    # Rank 1 computes for 5 s before it launches its receive.
    partition = even(2)
    first = parse_actions("F s0 m0 keep\nisend s0 m0 activation ->1\nwait_isend s0 m0 activation ->1")
    second = parse_actions("irecv s1 m0 activation <-0\nwait_irecv s1 m0 activation <-0\nF s1 m0 keep")
    program = program_of((first, second), partition)
    begin = np.array([0.0, 5.0])
    for buffered, expected in ((True, [1.0, 6.0]), (False, [6.0, 7.0])):
        timeline = Timeline(program, np.ones(2), np.ones(1), begin_s=begin, buffered=buffered)
        assert timeline.finish_s.tolist() == expected


def test_lists_that_wait_in_a_circle_are_refused():
    # Each rank waits for the other's result before it computes its own.
    first = """irecv s0 m0 gradient <-1
    wait_irecv s0 m0 gradient <-1
    F s0 m0 keep
    isend s0 m0 activation ->1"""
    second = """irecv s1 m0 activation <-0
    wait_irecv s1 m0 activation <-0
    F s1 m0 keep
    isend s1 m0 gradient ->0"""
    program = program_of((parse_actions(first), parse_actions(second)), even(2))
    with pytest.raises(ScheduleError, match=r"ranks \[0, 1\] wait"):
        Timeline(program, np.ones(2), np.ones(2))
