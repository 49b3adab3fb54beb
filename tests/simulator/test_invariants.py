"""What holds for the times of any lists: the critical path bounds a step, and more bandwidth or less work helps."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.costs.action_times import ActionTimes
from flowtrain.costs.cluster import Links
from flowtrain.costs.microbatches import MicrobatchColumns, MicrobatchWork
from flowtrain.pipeline.actions import ActionKind, Schedule, StageModule
from flowtrain.pipeline.dataflow import WHOLE, Dataflow, Work, trace_dataflow
from flowtrain.pipeline.partition import EncoderSplit, Partition, build_partition
from flowtrain.simulator.engine import Timeline
from flowtrain.simulator.lists import program_of
from flowtrain.simulator.program import Op, Program
from flowtrain.simulator.step import StepSimulator
from flowtrain.types.plan import Degrees
from tests.allocator.worlds import VISION
from tests.pipeline.random_schedules import random_schedule
from tests.simulator.test_engine import any_schedule, drawn_times
from tests.simulator.test_step import DEPTH, action_times, drawn_works

SEEDS = st.integers(0, 2**32 - 1)


def flow_of(lists: Schedule, partition: Partition) -> Dataflow:
    count = 1 + max(action.microbatch for actions in lists for action in actions)
    return trace_dataflow(lists, training=True, num_microbatches=count, frozen=partition.frozen)


def numbers_of(program: Program) -> dict[Work, int]:
    """The number of each computation, as the dataflow names it."""
    columns = program.computations
    names = zip(columns.is_backward, columns.place, columns.microbatch, columns.part, strict=True)
    return {(bool(back), int(place), int(k), int(part)): at for at, (back, place, k, part) in enumerate(names)}


def sent_in(program: Program) -> dict[tuple[bool, int, int, int], int]:
    moved = program.transfers
    names = zip(moved.is_gradient, moved.place, moved.microbatch, moved.part, strict=True)
    return {(bool(back), int(place), int(k), int(part)): at for at, (back, place, k, part) in enumerate(names)}


def between(flow: Dataflow, sent: dict[tuple[bool, int, int, int], int], work: Work, need: Work) -> list[int]:
    """Transfers that carry a need's result to the computation that uses it."""
    names = [need, (need[0], need[1], work[2], work[3])] if need[3] == WHOLE else [need]
    crosses = need[1] != work[1] and flow.ranks[need[1]] != flow.ranks[work[1]]
    return [sent[name] for name in names if crosses and name in sent][-1:]


@settings(max_examples=80, deadline=None)
@given(drawn=any_schedule(), seed=SEEDS, buffered=st.booleans())
def test_no_list_is_below_its_critical_path_or_a_ranks_work(drawn, seed, buffered):
    lists, partition = drawn
    program, flow = program_of(lists, partition), flow_of(lists, partition)
    seconds, transfers = drawn_times(Random(seed), program)
    numbers, sent = numbers_of(program), sent_in(program)
    paths: dict[Work, float] = {}

    def path(work: Work) -> float:
        if work not in paths:
            ends = [
                path(need) + sum(transfers[at] for at in between(flow, sent, work, need)) for need in flow.needs(work)
            ]
            paths[work] = max(ends, default=0.0) + seconds[numbers[work]]
        return paths[work]

    longest = max(map(path, numbers))
    timeline = Timeline(program, seconds, transfers, buffered=buffered)
    assert timeline.makespan_s >= longest
    assert (timeline.finish_s >= timeline.busy_s).all()


@settings(max_examples=80, deadline=None)
@given(drawn=any_schedule(), seed=SEEDS, buffered=st.booleans())
def test_the_simulated_order_is_one_that_the_executor_may_take(drawn, seed, buffered):
    """Each rank runs its list in order; nothing starts before what it needs is computed and has come."""
    lists, partition = drawn
    program, flow = program_of(lists, partition), flow_of(lists, partition)
    seconds, transfers = drawn_times(Random(seed), program)
    timeline = Timeline(program, seconds, transfers, buffered=buffered)
    numbers, sent, columns = numbers_of(program), sent_in(program), program.computations
    for work, number in numbers.items():
        start = timeline.starts[columns.op[number]]
        for need in flow.needs(work):
            crossing = sum(transfers[at] for at in between(flow, sent, work, need))
            assert timeline.ends[columns.op[numbers[need]]] + crossing <= start, (work, need)
    for rank, actions in enumerate(lists):
        span = slice(program.first[rank], program.first[rank + 1])
        own = program.op[span] < Op.MEET
        assert (np.diff(timeline.starts[span]) >= 0).all()
        kinds = [_OPS[action.kind] for action in actions]
        assert program.op[span][own].tolist() == kinds, "the rank runs its own list"
    # A wait for a transfer ends after both of its ends have launched it.
    launched = {kind: np.full(len(transfers), np.nan) for kind in (Op.ISEND, Op.IRECV)}
    for kind, times in launched.items():
        at = np.flatnonzero(program.op == kind)
        times[program.index[at]] = timeline.starts[at]
    waits = np.flatnonzero(program.op == Op.WAIT_IRECV)
    which = program.index[waits]
    assert (timeline.ends[waits] >= launched[Op.ISEND][which] + transfers[which]).all()
    if not buffered:
        assert (timeline.ends[waits] >= launched[Op.IRECV][which] + transfers[which]).all()


_OPS = {
    ActionKind.FORWARD_STAGE: Op.COMPUTE,
    ActionKind.BACKWARD_STAGE: Op.COMPUTE,
    ActionKind.ISEND: Op.ISEND,
    ActionKind.IRECV: Op.IRECV,
    ActionKind.WAIT_ISEND: Op.WAIT_ISEND,
    ActionKind.WAIT_IRECV: Op.WAIT_IRECV,
}


def makespan_s(simulator: StepSimulator, lists: Schedule, dp: int, works: list[MicrobatchWork]) -> float:
    program = simulator.program([lists] * dp)
    return Timeline(program, *simulator.durations(program, MicrobatchColumns.of(works)), buffered=False).makespan_s


@settings(max_examples=40, deadline=None)
@given(
    seed=SEEDS,
    degrees=st.sampled_from([(1, 2), (2, 2), (4, 3), (16, 1)]),
    place=st.sampled_from(["first", "mixed", "own"]),
    faster=st.floats(1.0, 8.0),
    sharding=st.sampled_from(["full", "gradients"]),
)
def test_more_bandwidth_and_less_work_never_slow_a_fixed_list(seed, degrees, place, faster, sharding):
    random, (dp, pp) = Random(seed), degrees
    encoder = EncoderSplit(VISION.num_layers, place, 0.2)
    partition = build_partition(DEPTH, pp, encoder=encoder)
    count, num_encoder = random.randint(1, 4), sum(each.module is StageModule.ENCODER for each in partition.stages)
    lists = random_schedule(random, partition, [random.choice([1, 2]) for _ in range(count)], join_at=num_encoder)
    works = drawn_works(random, count * dp, images=True)
    times = action_times(Degrees(dp, pp, 1), sharding)
    simulator = StepSimulator(partition, times, "vision")
    slow = makespan_s(simulator, lists, dp, works)

    device = times.times.device
    links = Links(device.links.node * faster, device.links.network * faster, "drawn", device.links.host * faster)
    for better in (
        replace(device, links=links),
        replace(device, bandwidth=device.bandwidth * faster),
        replace(device, flops=device.flops * faster),
    ):
        quick = ActionTimes(replace(times.times, device=better), times.degrees, times.shard_size)
        assert makespan_s(replace(simulator, times=quick), lists, dp, works) <= slow * (1 + 1e-9), better
    fewer = [
        replace(work, lengths=work.lengths[: random.randint(1, len(work.lengths))], target_tokens=0) for work in works
    ]
    assert makespan_s(simulator, lists, dp, fewer) <= slow * (1 + 1e-9)
