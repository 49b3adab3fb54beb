"""Steps in a row: encoders ahead within the lookahead, and what more of anything may not make slower."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.allocator.drawn_flow import DrawnStep, finishes
from flowtrain.costs.microbatches import MicrobatchColumns, MicrobatchWork
from flowtrain.pipeline.partition import build_partition
from flowtrain.pipeline.schedules.one_f_one_b import one_f_one_b
from flowtrain.simulator.encoders import EncodedStep
from flowtrain.simulator.pace import Pace
from flowtrain.simulator.run import StepWork, simulate
from flowtrain.simulator.step import StepSimulator
from flowtrain.types.plan import Degrees
from tests.simulator.test_step import DEPTH, action_times, drawn_works

SEEDS = st.integers(0, 2**32 - 1)


def drawn_steps(random: Random, simulator: StepSimulator, dp: int, count: int) -> list[StepWork]:
    steps = []
    for _ in range(count):
        num_slots = random.randint(1, 4)
        lists = one_f_one_b(simulator.partition, num_slots)
        works = MicrobatchColumns.of(drawn_works(random, num_slots * dp))
        seconds = np.array([random.uniform(0.0, 0.4) for _ in range(random.randint(1, 6))])
        needed = np.array(sorted(random.randint(0, len(seconds)) for _ in range(num_slots)))
        steps.append(StepWork(simulator.program([lists] * dp), works, (EncodedStep(seconds, needed),)))
    return steps


@settings(max_examples=50)
@given(seed=SEEDS, lookahead=st.integers(0, 3), is_barrier=st.booleans(), encoders=st.integers(1, 3))
def test_one_rank_ends_its_steps_as_the_planner_expects(seed, lookahead, is_barrier, encoders):
    random, simulator = Random(seed), StepSimulator(build_partition(DEPTH, 1), action_times(Degrees(1, 1, 1)))
    steps = drawn_steps(random, simulator, 1, random.randint(1, 3))
    drawn = []
    for step in steps:
        seconds, _ = simulator.durations(step.program, step.works)
        slots = np.bincount(step.program.computations.microbatch, seconds)
        drawn.append(DrawnStep(slots, simulator.optimizer_s(), step.encoded))
    expected = finishes(drawn, [encoders], lookahead, is_barrier=is_barrier, num_steps=7)
    found = simulate(simulator, steps, num_steps=7, replicas=[encoders], lookahead=lookahead, is_barrier=is_barrier)
    np.testing.assert_allclose(found.ends_s, expected)


@settings(max_examples=30)
@given(seed=SEEDS, dp=st.integers(1, 3), pp=st.integers(1, 3))
def test_more_encoders_more_lookahead_and_no_barrier_are_never_slower(seed, dp, pp):
    random, times = Random(seed), action_times(Degrees(dp, pp, 1))
    simulator = StepSimulator(build_partition(DEPTH, pp), times)
    steps = drawn_steps(random, simulator, dp, 2)
    slow = simulate(simulator, steps, num_steps=6, replicas=[1], lookahead=0, is_barrier=True).ends_s
    for changes in ({"replicas": [2]}, {"lookahead": 2}, {"is_barrier": False}):
        asked = {"replicas": [1], "lookahead": 0, "is_barrier": True, **changes}
        assert (simulate(simulator, steps, num_steps=6, **asked).ends_s <= slow + 1e-9).all(), changes


@settings(max_examples=30)
@given(seed=SEEDS, dp=st.integers(1, 3), pp=st.integers(1, 3), lookahead=st.integers(0, 2), is_barrier=st.booleans())
def test_steps_that_found_their_pace_go_on_as_if_all_were_timed(seed, dp, pp, lookahead, is_barrier):
    random, times = Random(seed), action_times(Degrees(dp, pp, 1))
    simulator = StepSimulator(build_partition(DEPTH, pp), times)
    steps = drawn_steps(random, simulator, dp, random.randint(1, 3))
    asked = {"num_steps": 20, "replicas": [2], "lookahead": lookahead, "is_barrier": is_barrier}
    found = simulate(simulator, steps, **asked)
    with patch.object(Pace, "is_found", return_value=False):
        expected = simulate(simulator, steps, **asked)
    for name in ("begin_s", "end_s", "starved_s", "busy_s"):
        of_steps = [[getattr(step, name) for step in run.steps] for run in (found, expected)]
        np.testing.assert_allclose(*of_steps, rtol=1e-7, atol=1e-9)


def test_a_starved_backbone_says_so():
    simulator = StepSimulator(build_partition(DEPTH, 1), action_times(Degrees(1, 1, 1)))
    work = MicrobatchColumns.of([MicrobatchWork((1024,), 512, 256)])
    program = simulator.program([one_f_one_b(simulator.partition, 1)])
    slow = StepWork(program, work, (EncodedStep(np.array([5.0]), np.array([1])),))
    run = simulate(simulator, [slow], num_steps=6, replicas=[1], lookahead=2)
    alone = simulate(simulator, [replace(slow, encoded=())], num_steps=6)
    assert run.step_s == pytest.approx(5.0)
    assert run.steps[-1].starved_s == pytest.approx(5.0 - alone.step_s)
    assert run.starved == pytest.approx(1.0 - alone.step_s / 5.0)
    assert alone.steps[-1].starved_s == 0.0
