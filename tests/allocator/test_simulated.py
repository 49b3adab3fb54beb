"""Simulated candidates: the rate by formula where nothing varies, and that the planner asks the simulator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.allocator.drawn import drawn_rate
from flowtrain.allocator.drawn_batches import DrawnBatches
from flowtrain.allocator.mode_candidate import ModeCandidate
from flowtrain.allocator.modes import compare_modes
from flowtrain.allocator.request import Request
from flowtrain.allocator.simulated import simulated_run, simulated_work
from flowtrain.allocator.surrogate import Surrogate
from flowtrain.config.load import load_config
from flowtrain.costs.action_times import DeviceTimes
from flowtrain.costs.profile import Profile, ReplicaCosts
from flowtrain.types.plan import Degrees
from flowtrain.types.run_plan import Mode
from tests.allocator.test_drawn import LARGE, asked_for, candidate, even, uneven
from tests.allocator.worlds import roofline_surrogate
from tests.profiles import cpu_profile

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def times_of(asked: Request, device: str, profile: Profile | None = None) -> DeviceTimes:
    patches, threads = asked.max_batch_patches, dict.fromkeys(asked.model.encoders, 1)
    device_type = asked.cluster[device]
    if profile is not None:
        device_type = replace(device_type, name="cpu")
    return DeviceTimes(device_type, asked.model, asked.setup, asked.workload.freeze, profile, patches, threads)


def rates(
    asked: Request, found: ModeCandidate, slowdown: float = 1.0, profile: Profile | None = None
) -> tuple[float, float]:
    """By formula from drawn batches, and simulated."""
    batches = DrawnBatches.draw(asked.workload)
    surrogate = roofline_surrogate(asked)
    if profile is not None:
        times = {"h200": times_of(asked, "h200", profile).of(asked.workload)}
        surrogate = Surrogate(asked.cluster, asked.model, asked.workload, asked.setup, times, 1.0, asked.slices)
    drawn = drawn_rate(asked, surrogate, found, batches, slowdown)
    work = simulated_work(asked, surrogate, lambda at, name: times_of(at, name, profile), found, batches, slowdown)
    run = simulated_run(asked, found, batches, work)
    return drawn.rate, asked.workload.global_batch_size / run.step_s


@settings(max_examples=25, deadline=None)
@given(
    mode=st.sampled_from(["decoupled", "disaggregated", "colocated", "monolithic", "llm_only"]),
    dp=st.sampled_from([1, 2, 8, 16]),
    tp=st.sampled_from([1, 2]),
    encoders=st.integers(1, 6),
)
def test_equal_samples_take_as_long_as_by_formula(mode: Mode, dp: int, tp: int, encoders: int) -> None:
    with_encoders = mode in ("decoupled", "disaggregated", "colocated")
    encoder = Degrees(dp * tp if mode == "colocated" else encoders)
    found = candidate(mode, Degrees(dp, 1, tp), encoder if with_encoders else None)
    drawn, simulated = rates(asked_for(even()), found, slowdown=1.05)
    assert simulated == pytest.approx(drawn, rel=0.01)


@pytest.mark.parametrize("slowdown", [1.0, 1.5])
@pytest.mark.parametrize("pp", [2, 4])
def test_equal_samples_take_a_shared_pipeline_as_long_as_by_formula(pp: int, slowdown: float) -> None:
    found = candidate("colocated", Degrees(2, pp), Degrees(2 * pp))
    asked = asked_for(even(), encoder=LARGE)
    drawn, simulated = rates(asked, found, slowdown)
    assert simulated == pytest.approx(drawn, rel=0.02)
    alone, _ = rates(asked, candidate("llm_only", Degrees(2, pp)))
    assert drawn < 0.98 * alone, "encoding is not hidden in the fill"


@pytest.mark.parametrize("reduction", ["step", "microbatch"])
def test_what_replicas_were_measured_to_take_counts(reduction: str) -> None:
    asked = asked_for(even(32))
    profile = cpu_profile(load_config(QUICKSTART), layer_s=1e-6)
    tables = {1: replace(profile.layers[1], num_tokens=(2048, 4096, 8192))}
    profile = replace(
        profile,
        layers=tables,
        heads=tables,
        connectors=tables,
        replicas={"full": ReplicaCosts(0.1, 1e-9, 0.2, 2e-9)},
    )
    found = candidate("llm_only", Degrees(2))
    found = replace(found, backbone=replace(found.backbone, gradient_reduction=reduction))
    drawn, simulated = rates(asked, found, profile=profile)
    without, _ = rates(asked, found, profile=replace(profile, replicas={}))
    assert simulated == pytest.approx(drawn, rel=0.01)
    assert drawn < 0.9 * without, "these costs matter here"


def test_a_plan_takes_the_simulated_rates() -> None:
    asked = asked_for(uneven(3))
    by_formula = compare_modes(asked, roofline_surrogate, None, ["llm_only"])
    simulated = compare_modes(asked, roofline_surrogate, None, ["llm_only"], times_of=times_of)
    assert simulated.winner.rate is not None and simulated.winner.candidate is not None
    _, rate = rates(asked.of(simulated.winner.candidate.backbone), simulated.winner.candidate)
    assert simulated.winner.rate == pytest.approx(rate)
    assert by_formula.winner.rate != simulated.winner.rate
