"""A simulated step: what each action takes, and the surrogate's step where nothing varies."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Literal
from unittest.mock import Mock, patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.allocator.candidates import Candidate
from flowtrain.allocator.surrogate import BACKBONE, calls_s, columns_of
from flowtrain.costs.action_times import ActionTimes, DeviceTimes, StageWork
from flowtrain.costs.microbatches import MicrobatchColumns, MicrobatchWork
from flowtrain.costs.model_spec import FROZEN_ENCODERS
from flowtrain.costs.module_times import ModuleTimes
from flowtrain.costs.roofline import Roofline
from flowtrain.pipeline.actions import StageModule
from flowtrain.pipeline.dataflow import WHOLE
from flowtrain.pipeline.image_parts import image_parts
from flowtrain.pipeline.partition import EncoderSplit, Partition, build_partition
from flowtrain.pipeline.schedules.one_f_one_b import one_f_one_b
from flowtrain.simulator.engine import Timeline
from flowtrain.simulator.program import Op, Program
from flowtrain.simulator.step import Passes, StepSimulator
from flowtrain.types.plan import Degrees
from tests.allocator.worlds import MODEL, SETUP, cluster, request, roofline_surrogate, workload
from tests.pipeline.random_schedules import random_schedule

LENGTH, VISION, TARGETS, PATCHES = 2048, 1024, 256, 1024
DEPTH = MODEL.backbone.num_layers


def action_times(degrees: Degrees, sharding: str = "full", reduction: str = "step") -> ActionTimes:
    setup = replace(SETUP, sharding=sharding, gradient_reduction=reduction)
    (device,) = cluster(h200=degrees.world_size).device_types
    return ActionTimes(DeviceTimes(device, MODEL, setup, FROZEN_ENCODERS), degrees, degrees.dp)


def timeline_of(simulator: StepSimulator, program: Program, works: list[MicrobatchWork]) -> Timeline:
    """Times of a step with these microbatches of all replicas."""
    return Timeline(program, *simulator.durations(program, MicrobatchColumns.of(works)))


def drawn_works(random: Random, count: int, *, images: bool = False) -> list[MicrobatchWork]:
    works = []
    for _ in range(count):
        lengths = tuple(random.randint(64, 2048) for _ in range(random.randint(1, 6)))
        patches = tuple(random.choice([64, 256, 1024]) for _ in range(random.randint(0, 5))) if images else ()
        works.append(MicrobatchWork(lengths, sum(lengths) // 2, sum(lengths) // 4, patches))
    return works


@given(
    dp=st.sampled_from([1, 2, 8]),
    sharding=st.sampled_from(["full", "gradients"]),
    reduction=st.sampled_from(["microbatch", "step"]),
    samples=st.integers(1, 4),
    microbatches=st.integers(1, 5),
    summing_s=st.sampled_from([0.0, 1e-13, 1e-11]),
)
def test_equal_microbatches_take_the_surrogates_step(
    dp: int, sharding: str, reduction: Literal["microbatch", "step"], samples: int, microbatches: int, summing_s: float
) -> None:
    """summing_s: for each parameter, what a step's first backward takes less."""
    with patch.object(Roofline, "first_backward_s", lambda self, trained: summing_s * trained):
        expect_the_surrogates_step(dp, sharding, reduction, samples, microbatches)


def expect_the_surrogates_step(
    dp: int, sharding: str, reduction: Literal["microbatch", "step"], samples: int, microbatches: int
) -> None:
    times, partition = action_times(Degrees(dp, 1, 1), sharding, reduction), build_partition(DEPTH, 1)
    data = workload(
        global_batch_size=dp * samples * microbatches,
        microbatch_tokens=LENGTH * samples,
        fill=1.0,
        lengths=np.array([LENGTH]),
        vision_lengths=np.array([VISION]),
        target_lengths=np.array([TARGETS]),
        images={"vision": (np.array([1]), np.array([PATCHES]))},
    )
    surrogate = roofline_surrogate(request(cluster(h200=dp), MODEL, data, times.times.setup))
    expected = surrogate.step_time(Candidate(BACKBONE, "h200", Degrees(dp, 1, 1), 0.0, gradient_reduction=reduction))
    work = MicrobatchWork((LENGTH,) * samples, VISION * samples, TARGETS * samples)
    simulator = StepSimulator(partition, times)
    program = simulator.program([one_f_one_b(partition, microbatches)] * dp)
    timeline = timeline_of(simulator, program, [work] * microbatches * dp)
    assert timeline.makespan_s + simulator.optimizer_s() == pytest.approx(float(expected.total[0]), rel=1e-6)


@given(seed=st.integers(0, 2**32 - 1), dp=st.sampled_from([1, 2]), pp=st.integers(1, 3))
def test_every_action_takes_its_own_time(seed: int, dp: int, pp: int) -> None:
    random, times = Random(seed), action_times(Degrees(dp, pp, 1))
    encoder = MODEL.encoders["vision"]
    partition = build_partition(DEPTH, pp, encoder=EncoderSplit(encoder.num_layers, "first", 0.3))
    num_parts = [random.choice([1, 2, 3]) for _ in range(random.randint(1, 4))]
    backbone_starts = len(partition.of_module(StageModule.ENCODER))
    lists = random_schedule(random, partition, num_parts, join_at=backbone_starts)
    works = [drawn_works(random, len(num_parts), images=True) for _ in range(dp)]
    simulator = StepSimulator(partition, times, encoder="vision")
    program = simulator.program([lists] * dp)
    seconds, transfers = simulator.durations(program, MicrobatchColumns.of([work for each in works for work in each]))
    columns = program.computations
    for number in range(len(columns)):
        stage = partition.stages[columns.place[number]]
        work = works[columns.rank[number] // pp][columns.microbatch[number]]
        part = int(columns.part[number])
        if part != WHOLE:
            span = image_parts(work.patches, num_parts[columns.microbatch[number]])[part]
            work = replace(work, patches=work.patches[span.start : span.stop])
        assert seconds[number] == pytest.approx(expected_s(times, partition, stage, work, columns, number))
    moved = program.transfers
    for number in range(len(moved)):
        work = works[moved.source[number] // pp][moved.microbatch[number]]
        producer = partition.stages[moved.place[number] - moved.is_gradient[number]]
        if producer.module is StageModule.ENCODER:
            if moved.part[number] != WHOLE:
                span = image_parts(work.patches, num_parts[moved.microbatch[number]])[int(moved.part[number])]
                work = replace(work, patches=work.patches[span.start : span.stop])
            assert transfers[number] == pytest.approx(times.rows_s("vision", work))
        else:
            assert transfers[number] == pytest.approx(times.transfer_s(work))


def expected_s(times: ActionTimes, partition: Partition, stage, work, columns, number: int) -> float:
    stages = partition.of_module(stage.module)
    asked = StageWork(
        len(stage.layers),
        is_first=stage.index == 0,
        is_last=stage.index == len(stages) - 1,
        has_backward=stage.has_backward,
        encoder="vision" if stage.module is StageModule.ENCODER else None,
    )
    is_backward = bool(columns.is_backward[number])
    computing = times.backward_s(asked, work) if is_backward else times.forward_s(asked, work)
    exposed = times.gather_s(asked, computing, of_backward=is_backward) if times.gathers else 0.0
    if times.degrees.dp > 1 and is_backward and columns.is_last[number]:
        exposed += times.reduce_s(asked, computing, is_last=True)
    return computing + exposed


def test_replicas_with_less_to_do_wait_for_the_others() -> None:
    times, partition = action_times(Degrees(2, 1, 1)), build_partition(DEPTH, 1)
    long, short = MicrobatchWork((4096,), 0, 512), MicrobatchWork((1024,), 0, 512)
    simulator = StepSimulator(partition, times)
    program = simulator.program([one_f_one_b(partition, 2)] * 2)
    uneven = timeline_of(simulator, program, [long, short, short, long])
    even = timeline_of(simulator, program, [long, short, long, short])
    assert uneven.makespan_s > 1.2 * even.makespan_s  # each slot takes as long as its longer microbatch
    assert uneven.finish_s[0] == uneven.finish_s[1]


@pytest.mark.parametrize(("dtype", "gathered"), [("bfloat16", 1 / 3), ("float32", 1 / 2)])
def test_what_replicas_were_measured_to_cost_a_step_is_a_gather_and_a_reduction(dtype: str, gathered: float) -> None:
    """Where parameters stay whole during a step: in its first forward and its last backward, by their bytes."""
    times = action_times(Degrees(2, 1, 1), "gradients")
    costs = Mock(ModuleTimes, replicas_s=lambda *asked: (np.zeros(1), np.array([0.6])))
    on_devices = replace(times.times, setup=replace(times.times.setup, dtype=dtype))
    on_devices.__dict__["of_any_data"] = costs
    partition = build_partition(DEPTH, 1)
    simulator = StepSimulator(partition, replace(times, times=on_devices))
    passes = Passes(
        is_backward=np.array([False, False, True, True]),
        is_last=np.array([False, False, False, True]),
        is_first=np.array([True, False, False, False]),
    )
    exposed = simulator.exposed_s(partition.stages[0], passes, np.ones(4))
    assert exposed == pytest.approx([0.6 * gathered, 0.0, 0.0, 0.6 * (1 - gathered)])


@pytest.mark.parametrize("pp", [1, 2, 3])
def test_the_ends_of_a_step_delay_each_rank_once(pp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's first forward waits for that of the rank before, and its last backward for that of the rank after."""
    partition = build_partition(DEPTH, pp)
    simulator = StepSimulator(partition, action_times(Degrees(1, pp, 1)))
    works = [MicrobatchWork((LENGTH,), VISION, TARGETS)] * 4
    program = simulator.named("1f1b", len(works), 1)
    before = timeline_of(simulator, program, works).makespan_s
    monkeypatch.setattr(ActionTimes, "ends_s", lambda times, stage: (2.0, 3.0))
    assert timeline_of(simulator, program, works).makespan_s == pytest.approx(before + 5.0 * pp)


@pytest.mark.parametrize(("pp", "chunks"), [(1, 1), (2, 1), (2, 3), (4, 2)])
@pytest.mark.parametrize("dp", [1, 2])
def test_the_first_backward_of_each_stage_takes_less(dp: int, pp: int, chunks: int) -> None:
    count = 8
    simulator = StepSimulator(build_partition(DEPTH, pp, chunks), action_times(Degrees(dp, pp, 1)))
    program = simulator.named("1f1b" if chunks == 1 else "interleaved_1f1b", count, dp)
    works = MicrobatchColumns.of(drawn_works(Random(0), count * dp))
    before, _ = simulator.durations(program, works)
    with patch.object(Roofline, "first_backward_s", lambda self, trained: 0.0 * trained + 1e-6):
        less = before - simulator.durations(program, works)[0]
    columns, begun = program.computations, set[tuple[int, int]]()
    for number, seconds in enumerate(less):
        stage = int(columns.rank[number]), int(columns.place[number])
        is_first = bool(columns.is_backward[number]) and stage not in begun
        assert seconds == pytest.approx(1e-6 * is_first, abs=1e-12)
        if is_first:
            begun.add(stage)
    assert len(begun) == dp * pp * chunks


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_ranks_spend_time_on_their_ends_of_transfers(pp: int, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    partition, count = build_partition(DEPTH, pp, chunks), 8
    simulator = StepSimulator(partition, action_times(Degrees(1, pp, 1)))
    program = simulator.named("1f1b" if chunks == 1 else "interleaved_1f1b", count, 1)
    works = MicrobatchColumns.of(drawn_works(Random(0), count))
    alone, transfers = simulator.durations(program, works)
    monkeypatch.setattr(ActionTimes, "launch_s", 0.5)
    seconds, same = simulator.durations(program, works)
    assert same.tolist() == transfers.tolist(), "they do not travel for longer"
    of_rank = np.bincount(program.computations.rank, seconds - alone, pp)
    kinds = [program.op[first:last] for first, last in zip(program.first, program.first[1:], strict=False)]
    ends = np.array([int(np.isin(each, [Op.ISEND, Op.IRECV]).sum()) for each in kinds])
    np.testing.assert_allclose(of_rank, 0.5 * ends)
    # The planner's formula has the rank with the most of them.
    times = Mock(microbatch_s=lambda replica_size: np.zeros(len(replica_size)), launch_s=0.5, pass_s=0.0)
    asked = columns_of(Candidate(BACKBONE, "h200", Degrees(1, pp, 1)))
    assert calls_s(times, asked, chunks).tolist() == [0.5 * ends.max() / count]


@pytest.mark.parametrize(("pp", "chunks"), [(1, 1), (2, 1), (2, 3), (4, 2)])
def test_ranks_spend_time_on_each_of_their_stages(pp: int, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 8
    simulator = StepSimulator(build_partition(DEPTH, pp, chunks), action_times(Degrees(1, pp, 1)))
    program = simulator.named("1f1b" if chunks == 1 else "interleaved_1f1b", count, 1)
    works = MicrobatchColumns.of(drawn_works(Random(0), count))
    alone, _ = simulator.durations(program, works)
    monkeypatch.setattr(Roofline, "pass_s", 0.5)
    seconds, _ = simulator.durations(program, works)
    of_rank = np.bincount(program.computations.rank, seconds - alone, pp) / count
    np.testing.assert_allclose(of_rank, 0.5 * chunks)
    times = Mock(microbatch_s=lambda replica_size: np.zeros(len(replica_size)), launch_s=0.0, pass_s=0.5)
    asked = columns_of(Candidate(BACKBONE, "h200", Degrees(1, pp, 1)))
    assert calls_s(times, asked, chunks).tolist() == pytest.approx([of_rank.max()])
