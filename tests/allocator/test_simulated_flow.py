"""Candidates timed through the real flow: the formula's rate where nothing varies, in every mode and order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.allocator.drawn import drawn_rate
from flowtrain.allocator.drawn_batches import DrawnBatches
from flowtrain.allocator.mode_candidate import ModeCandidate
from flowtrain.allocator.request import Request
from flowtrain.allocator.simulated_flow import FlowCandidate
from flowtrain.config.run import RunConfig
from flowtrain.controller.planning.planned import planned_model
from flowtrain.simulator.flow_run import Disturbances, FlowRun, Loss
from flowtrain.types.plan import Degrees
from flowtrain.types.run_plan import Mode, ModulePlan, Plan
from tests.allocator.test_drawn import LARGE, asked_for, candidate, even, uneven
from tests.allocator.test_simulated import times_of
from tests.allocator.worlds import MODELS, roofline_surrogate

FEEDERS = 64
"""Enough for any rate here."""


def config_of(**changes: object) -> RunConfig:
    config = planned_model(MODELS / "vlm_6b.yaml").config
    return config.model_copy(update={"data": config.data.model_copy(update=changes)})


def run_of(
    asked: Request,
    found: ModeCandidate,
    *,
    segment_nbytes: int = 1 << 34,
    config: RunConfig | None = None,
    disturbances: Disturbances | None = None,
    num_steps: int = 12,
) -> FlowRun:
    encoders = {
        name: ModulePlan(data_parallel_size=each.degrees.dp, segment_nbytes=segment_nbytes)
        for name, each in found.encoders.items()
    }
    plan = Plan(encoders, ModulePlan(), ModulePlan(data_parallel_size=FEEDERS), mode=found.mode)
    return FlowCandidate(
        asked,
        roofline_surrogate(asked),
        times_of,
        found,
        DrawnBatches.draw(asked.workload),
        config or config_of(),
        plan,
        1.05,
        disturbances or Disturbances(),
    ).simulated(num_steps)


@settings(max_examples=20, deadline=None)
@given(
    mode=st.sampled_from(["decoupled", "disaggregated", "colocated", "monolithic", "llm_only"]),
    dp=st.sampled_from([1, 2, 8, 16]),
    tp=st.sampled_from([1, 2]),
    encoders=st.integers(1, 6),
)
def test_equal_samples_take_about_as_long_as_by_formula(mode: Mode, dp: int, tp: int, encoders: int) -> None:
    with_encoders = mode in ("decoupled", "disaggregated", "colocated")
    encoder = Degrees(dp * tp if mode == "colocated" else encoders)
    found = candidate(mode, Degrees(dp, 1, tp), encoder if with_encoders else None)
    asked = asked_for(even())
    drawn = drawn_rate(asked, roofline_surrogate(asked), found, DrawnBatches.draw(asked.workload), 1.05)
    assert asked.workload.global_batch_size / run_of(asked, found).step_s == pytest.approx(drawn.rate, rel=0.05)


@pytest.mark.parametrize("order", ["deterministic", "arrival"])
@pytest.mark.parametrize("mode", ["decoupled", "monolithic", "llm_only"])
def test_both_orders_take_about_as_long(mode: Mode, order: str) -> None:
    asked = asked_for(uneven(1))
    found = candidate(mode, Degrees(4), Degrees(4) if mode == "decoupled" else None)
    drawn = drawn_rate(asked, roofline_surrogate(asked), found, DrawnBatches.draw(asked.workload))
    run = run_of(asked, found, config=config_of(order=order))
    assert asked.workload.global_batch_size / run.step_s == pytest.approx(drawn.rate, rel=0.15)


def searched(policy: str, **parts: bool) -> RunConfig:
    config = config_of()
    changes = {"policy": policy, "pipetune": config.pipeline.pipetune.model_copy(update=parts)}
    return config.model_copy(update={"pipeline": config.pipeline.model_copy(update=changes)})


@pytest.mark.parametrize("mode", ["decoupled", "monolithic"])
def test_steps_are_searched_as_the_run_searches_them(mode: Mode) -> None:
    asked = asked_for(uneven(3), encoder=LARGE)
    found = candidate(mode, Degrees(2, 4), Degrees(8) if mode == "decoupled" else None)
    plain, all_parts, in_time = (
        run_of(asked, found, config=config).step_s
        for config in (searched("none"), searched("pipetune"), searched("pipetune", precompute=False))
    )
    assert all_parts < 0.99 * plain
    # Images that are encoded ahead need lists of their own, which the simulation must follow to tell the difference.
    assert all_parts < 0.999 * in_time if mode == "monolithic" else all_parts == in_time


def test_a_large_batch_is_simulated_by_a_share_of_the_replicas() -> None:
    asked = asked_for(uneven(2, batch=4096))
    found = candidate("decoupled", Degrees(32), Degrees(16))
    drawn = drawn_rate(asked, roofline_surrogate(asked), found, DrawnBatches.draw(asked.workload))
    run = run_of(asked, found, num_steps=4)
    assert run.last.program.num_replicas < 32
    assert asked.workload.global_batch_size / run.step_s == pytest.approx(drawn.rate, rel=0.15)


def test_a_small_pool_and_a_lost_encoder_show() -> None:
    asked = asked_for(uneven(3))
    found = candidate("decoupled", Degrees(8), Degrees(1))
    free = run_of(asked, found)
    lost = run_of(asked, found, disturbances=Disturbances(losses=(Loss("vision", free.ends_s[1], 60.0),)))
    assert lost.ends_s[-1] > free.ends_s[-1] + 10.0
    assert lost.flow.starved_s > free.flow.starved_s + 10.0
    assert free.flow.pool_nbytes == 1 << 34
    tight = run_of(asked, found, segment_nbytes=1 << 28)
    assert tight.flow.pool_peak_nbytes <= 1 << 28
    assert tight.flow.lookahead <= free.flow.lookahead


def test_memory_of_features_is_that_of_their_rows() -> None:
    asked = asked_for(even(16))
    found = candidate("disaggregated", Degrees(2), Degrees(1))
    run = run_of(asked, found, config=config_of())
    rows = 1024 * asked.model.connector.feature_dim * asked.setup.dtype_nbytes
    assert run.flow.pool_peak_nbytes % rows == 0 and run.flow.pool_peak_nbytes >= 16 * rows
