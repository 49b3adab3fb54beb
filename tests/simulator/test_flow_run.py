"""A run in virtual time through the real flow: exactly once, causes before effects, and the step engine's times."""

from __future__ import annotations

from random import Random
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.errors import ConfigError
from flowtrain.flow.idle import IdleTime
from flowtrain.simulator.flow_run import FEEDERS, Disturbances, FlowRun, Loss, simulate_flow
from flowtrain.simulator.gantt import BACKWARD, BOTH, FORWARD, text_rows
from flowtrain.simulator.run import StepWork, simulate
from flowtrain.types.plan import Unit, UnitKind
from flowtrain.types.run_plan import Mode
from tests.simulator.worlds import (
    LARGEST_LEASE,
    PLENTY,
    VISION,
    Record,
    drawn_samples,
    encoded_steps,
    planner_of,
    simulator_of,
    step_of,
    works_of,
    world_of,
)

SEEDS = st.integers(0, 2**32 - 1)
MODES = st.sampled_from([mode for mode in get_args(Mode) if mode != "colocated"])


def check(record: Record, run: FlowRun, num_positions: int, *, encodes: bool) -> None:
    """Every position was consumed once, and nothing came before its cause."""
    assert sorted(record.order) == list(range(num_positions))
    for position, consumed_s in record.consumed.items():
        assert record.sized[position] <= record.located[position] <= consumed_s
        if encodes and record.ready[position]:
            assert record.sized[position] <= record.leased[position][0] <= record.ready[position][0]
            assert record.ready[position][0] <= record.located[position]
    begins, ends = [each.begin_s for each in run.steps], [each.end_s for each in run.steps]
    assert begins == [0.0, *ends[:-1]] and ends == sorted(ends)
    assert run.flow.pool_mean_nbytes <= run.flow.pool_peak_nbytes <= run.flow.pool_nbytes
    assert all(0.0 <= busy <= 1.0 for busy in run.flow.busy.values())
    assert 0.0 <= run.starved <= run.held_up * (1.0 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(
    seed=SEEDS,
    mode=MODES,
    arrival=st.booleans(),
    dp=st.integers(1, 3),
    pp=st.integers(1, 2),
    encoders=st.integers(1, 3),
    feeders=st.integers(1, 3),
    lookahead=st.integers(1, 3),
    prefetch=st.integers(1, 4),
    spread=st.sampled_from([0.0, 0.5]),
)
def test_every_mode_runs_every_position_once(
    seed, mode, arrival, dp, pp, encoders, feeders, lookahead, prefetch, spread
):
    samples, record = drawn_samples(Random(seed)), Record()
    world = world_of(
        samples,
        simulator_of(dp, pp),
        dp,
        record=record,
        mode=mode,
        arrival=arrival,
        encoders=encoders,
        feeders=feeders,
        patch_s=1e-4,
        decode_share=0.3,
        sample_s=1e-4,
        lookahead=lookahead,
        prefetch=prefetch,
        disturbances=Disturbances(spread, seed=seed),
    )
    run = simulate_flow(world)
    check(record, run, 5 * samples.batch_size, encodes=mode in ("decoupled", "disaggregated"))
    if not arrival:
        assert record.order == sorted(record.order)
    assert run.flow.lost.encode_s == 0.0 and run.flow.lost.num_remade == 0


@settings(max_examples=40, deadline=None)
@given(
    seed=SEEDS,
    mode=st.sampled_from(["decoupled", "disaggregated"]),
    arrival=st.booleans(),
    whole=st.booleans(),
    encoders=st.integers(1, 3),
)
def test_losses_cost_time_and_never_a_position(seed, mode, arrival, whole, encoders):
    random, record = Random(seed), Record()
    samples = drawn_samples(random)
    losses = tuple(
        Loss(random.choice([VISION, FEEDERS]), random.uniform(0.0, 2.0), random.choice([0.0, 0.1, 1.0]))
        for _ in range(random.randint(1, 4))
    )
    world = world_of(
        samples,
        simulator_of(2, 1),
        2,
        record=record,
        mode=mode,
        arrival=arrival,
        encoders=encoders,
        feeders=2,
        patch_s=3e-4,
        decode_share=0.5,
        sample_s=1e-3,
        lookahead=2,
        segment_nbytes=PLENTY if whole else 8 * LARGEST_LEASE,
        disturbances=Disturbances(losses=losses),
    )
    check(record, simulate_flow(world), 5 * samples.batch_size, encodes=True)


def test_what_was_lost_is_counted():
    samples = drawn_samples(Random(1), alike=True)
    asked = {"encoders": 1, "patch_s": 1e-3, "sample_s": 1e-4, "lookahead": 1}
    quiet = simulate_flow(world_of(samples, simulator_of(1, 1), 1, **asked))
    # In the middle of the third forward, which begins with the first lease and takes 0.512 s as all do.
    hit = Disturbances(losses=(Loss(VISION, 1.3, 0.1), Loss(FEEDERS, 1.4, 0.2)))
    run = simulate_flow(world_of(samples, simulator_of(1, 1), 1, **asked, disturbances=hit))
    assert run.flow.lost.encode_s > 0.2
    assert run.flow.lost.num_remade > 0
    assert run.ends_s[-1] > quiet.ends_s[-1]


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, pp=st.integers(1, 3), lookahead=st.integers(1, 3), prefetch=st.integers(1, 4))
def test_one_encoder_and_one_replica_take_the_step_engines_time(seed, pp, lookahead, prefetch):
    samples, simulator, patch_s = drawn_samples(Random(seed)), simulator_of(1, pp), 1e-4
    steps = [
        StepWork(simulator.named("1f1b", plan.num_slots, 1), works_of(plan), (encoded,))
        for plan, encoded in encoded_steps(samples, 1, patch_s)
    ]
    expected = simulate(simulator, steps, num_steps=7, replicas=[1], lookahead=lookahead)
    world = world_of(
        samples,
        simulator,
        1,
        num_steps=7,
        encoders=1,
        patch_s=patch_s,
        lookahead=lookahead,
        prefetch=prefetch,
    )
    np.testing.assert_allclose(simulate_flow(world).ends_s, expected.ends_s)


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, mode=MODES, dp=st.integers(1, 3), pp=st.integers(1, 2))
def test_without_waits_for_data_steps_take_the_step_engines_time(seed, mode, dp, pp):
    samples, simulator = drawn_samples(Random(seed)), simulator_of(dp, pp)
    steps = [step_of(simulator, samples)(plan) for plan, _ in encoded_steps(samples, dp, 0.0)]
    expected = simulate(simulator, steps, num_steps=5)
    run = simulate_flow(world_of(samples, simulator, dp, mode=mode, patch_s=0.0))
    np.testing.assert_allclose(run.ends_s, expected.ends_s)
    assert run.flow.starved_s == pytest.approx(0.0)


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, dp=st.integers(1, 2), encoders=st.integers(1, 4), patch_s=st.floats(1e-5, 1e-3))
def test_more_encoders_never_slow_a_run_of_equal_batches(seed, dp, encoders, patch_s):
    samples, simulator = drawn_samples(Random(seed), alike=True), simulator_of(dp, 1)
    few, more = (
        simulate_flow(world_of(samples, simulator, dp, encoders=count, patch_s=patch_s)).ends_s
        for count in (encoders, encoders + 1)
    )
    assert (more <= few + 1e-9).all()


def test_a_full_pool_holds_encoders_back_and_too_small_a_pool_is_refused():
    samples, simulator = drawn_samples(Random(3), alike=True), simulator_of(1, 1)
    asked = {"encoders": 1, "patch_s": 1e-4, "lookahead": 3, "num_steps": 8}
    free = simulate_flow(world_of(samples, simulator, 1, **asked))
    room = 4 * LARGEST_LEASE
    tight = simulate_flow(world_of(samples, simulator, 1, **asked, segment_nbytes=room, prefetch=1))
    assert free.flow.pool_peak_nbytes > tight.flow.pool_peak_nbytes
    assert tight.flow.pool_peak_nbytes <= room
    assert tight.ends_s[-1] >= free.ends_s[-1] - 1e-9
    with pytest.raises(ConfigError, match=r"gets stuck after .*encoders\.<name>\.segment_nbytes"):
        simulate_flow(world_of(samples, simulator, 1, **asked, segment_nbytes=256))


def test_slow_feeders_starve_a_run_and_a_small_segment_slows_them():
    samples, simulator = drawn_samples(Random(4)), simulator_of(1, 1)
    steps = {"num_steps": 6, "patch_s": 1e-7}
    fast = simulate_flow(world_of(samples, simulator, 1, **steps))
    slow = simulate_flow(world_of(samples, simulator, 1, **steps, sample_s=1.0))
    assert slow.step_s == pytest.approx(samples.batch_size * 1.0, rel=0.05)
    assert slow.flow.starved_s > fast.flow.starved_s
    assert slow.flow.busy["feeder"] == pytest.approx(1.0, rel=0.05) and fast.flow.busy["feeder"] == 0.0
    assert simulate_flow(world_of(samples, simulator, 1, **steps, sample_s=1.0, feeders=6)).step_s < slow.step_s / 4
    # Room for what a lookahead of one unit takes, whatever the lookahead.
    room = fast.flow.feeders_peak_nbytes
    waits = simulate_flow(world_of(samples, simulator, 1, **steps, feeder_nbytes=room, lookahead=3))
    assert waits.flow.feeders_peak_nbytes <= room


def test_a_chart_tells_forwards_and_backwards_apart_where_there_is_room():
    run = simulate_flow(world_of(drawn_samples(Random(4)), simulator_of(1, 1), 1, num_steps=4, patch_s=1e-7))
    assert text_rows(run.last, range(1), 1) == [BOTH]
    (line,) = text_rows(run.last, range(1), 400)
    assert {FORWARD, BACKWARD} <= set(line)


def test_uneven_encoders_are_slower_than_even_ones_on_average():
    samples, simulator = drawn_samples(Random(5), alike=True), simulator_of(1, 1)
    asked = {"encoders": 3, "patch_s": 1e-3, "num_steps": 20}
    even = simulate_flow(world_of(samples, simulator, 1, **asked))
    uneven = [
        simulate_flow(world_of(samples, simulator, 1, **asked, disturbances=Disturbances(1.0, seed=seed))).step_s
        for seed in range(5)
    ]
    assert np.mean(uneven) > even.step_s
    assert len(set(uneven)) == 5, "seeds draw other times"


def test_a_simulated_run_keeps_no_idle_time_of_the_wall_clock(monkeypatch):
    monkeypatch.setattr(IdleTime, "note", lambda *_: pytest.fail("nothing takes it"))
    assert len(simulate_flow(world_of(drawn_samples(Random(5)), simulator_of(1, 1), 1, num_steps=3)).steps) == 3


def test_a_batch_is_planned_once_and_moved():
    samples = drawn_samples(Random(6))
    world = world_of(samples, simulator_of(2, 1), 2)
    planner = world.make_flow(lambda: 0.0).steps._planner
    for index in range(5):
        positions = range(index * samples.batch_size, (index + 1) * samples.batch_size)
        unit = Unit(index, UnitKind.TRAIN, index + 1, positions.start, len(positions))
        sized = samples.sized(positions)
        assert planner.plan(unit, planner.sizes_of(sized)) == planner_of(2).plan(unit, sized)
