"""Replicas that do the same are timed once: the others' times, means and waits stay."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.costs.microbatches import MicrobatchColumns
from flowtrain.pipeline.partition import build_partition
from flowtrain.simulator.engine import Timeline
from flowtrain.simulator.folding import Fold
from flowtrain.simulator.run import StepWork, simulate
from flowtrain.simulator.step import StepSimulator
from flowtrain.types.plan import Degrees
from tests.simulator.test_step import DEPTH, action_times, drawn_works

SEEDS = st.integers(0, 2**32 - 1)


@settings(max_examples=40, deadline=None)
@given(
    seed=SEEDS,
    sizes=st.sampled_from([(2, 2), (4, 2), (4, 4), (6, 3), (8, 2), (3, 1)]),
    pp=st.integers(1, 3),
    count=st.integers(1, 4),
    kinds=st.integers(1, 3),
    reduction=st.sampled_from(["step", "microbatch"]),
)
def test_folded_replicas_take_the_same_time(seed, sizes, pp, count, kinds, reduction):
    random, (dp, shard_size) = Random(seed), sizes
    times = action_times(Degrees(dp, pp, 1), reduction=reduction)
    times = type(times)(times.times, times.degrees, shard_size)
    simulator = StepSimulator(build_partition(DEPTH, pp), times)
    different = [drawn_works(random, count, images=True) for _ in range(kinds)]
    chosen = [random.randrange(kinds) for _ in range(dp)]
    works = MicrobatchColumns.of([work for kind in chosen for work in different[kind]])
    whole = simulator.named("1f1b", count, dp)
    program, kept = simulator.folded("1f1b", works, dp)
    assert program.stands_for.sum() == dp and len(kept) == count * program.num_replicas
    every, some = (Timeline(each, *simulator.durations(each, own)) for each, own in ((whole, works), (program, kept)))
    fold = Fold.of(works, [shard_size] * (dp // shard_size))
    ranks = (fold.kept[:, None] * pp + np.arange(pp)).reshape(-1)
    np.testing.assert_allclose(some.finish_s, every.finish_s[ranks])
    assert program.mean(some.busy_s) == pytest.approx(whole.mean(every.busy_s))
    first, second = (
        simulate(simulator, [StepWork(each, own)], num_steps=2) for each, own in ((whole, works), (program, kept))
    )
    assert (first.step_s, first.bubble) == (pytest.approx(second.step_s), pytest.approx(second.bubble))
    assert [sum(each.values()) for each in first.rank_peaks()] == [sum(each.values()) for each in second.rank_peaks()]


def test_equal_replicas_are_timed_once():
    simulator = StepSimulator(build_partition(DEPTH, 2), action_times(Degrees(64, 2, 1)))
    works = MicrobatchColumns.of(drawn_works(Random(0), 4) * 64)
    program, kept = simulator.folded("1f1b", works, 64)
    assert (program.num_replicas, program.stands_for.tolist(), len(kept)) == (1, [64], 4)


def test_different_replicas_are_all_timed():
    simulator = StepSimulator(build_partition(DEPTH, 2), action_times(Degrees(4, 2, 1)))
    works = MicrobatchColumns.of(drawn_works(Random(0), 16))
    program, kept = simulator.folded("1f1b", works, 4)
    assert program.num_replicas == 4 and kept is works
