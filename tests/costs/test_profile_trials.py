"""What trials of plans say about the rates of others."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from flowtrain.costs.profile_trials import Trial, TriedPlan, corrected_rate, correction, was_tried
from flowtrain.types.plan import Degrees
from flowtrain.types.run_plan import BackboneSettings

SETTINGS = BackboneSettings(1024, "none", 1, "full")
ONE = TriedPlan("decoupled", Degrees(), {"vision": Degrees()}, SETTINGS)
PIPELINE = TriedPlan("colocated", Degrees(pp=2), {"vision": Degrees(dp=2)}, SETTINGS)
REPLICAS = TriedPlan("colocated", Degrees(dp=2), {"vision": Degrees(dp=2)}, SETTINGS)
rates = st.floats(0.1, 1e4)


def test_without_trials_predictions_stay() -> None:
    assert correction((), ONE) == 1.0 and not was_tried((), ONE)


@given(rates, st.lists(rates, min_size=1, max_size=3))
def test_a_tried_plan_gets_its_measured_rate(predicted: float, measured: list[float]) -> None:
    others = [Trial(PIPELINE, 10.0, (30.0,)), Trial(REPLICAS, 10.0, (0.0,))]
    trials = [*others, Trial(ONE, predicted, tuple(measured))]
    found = predicted * correction(trials, ONE)
    assert min(measured) * (1 - 1e-9) <= found <= max(measured) * (1 + 1e-9)
    assert was_tried(trials, ONE)


@given(rates, rates, rates, st.floats(0.91, 1.09))
def test_luck_does_not_put_a_barrier_before_its_absence(free: float, barrier: float, one: float, luck: float) -> None:
    """Both plans do the same work, so the predicted order stays, whichever of them had the luckier trial."""
    waiting = replace(ONE, mode="disaggregated")
    free, barrier = max(free, barrier), min(free, barrier)
    trials = [Trial(ONE, free, (one,)), Trial(waiting, barrier, (luck * one,))]
    assert free * correction(trials, ONE) >= barrier * correction(trials, waiting)
    rated = [corrected_rate(free, trials, ONE), corrected_rate(barrier, trials, waiting)]
    ran = [each.measured for each in trials]
    assert max(ran) >= rated[0] >= rated[1] >= min(ran), "neither is rated as none ran"
    for apart in (0.85, 1.15):  # is more than luck
        trials[1] = Trial(waiting, barrier, (apart * one,))
        assert barrier * correction(trials, waiting) == pytest.approx(apart * one)
        assert free * correction(trials, ONE) == pytest.approx(one)
    assert correction(trials[:1], waiting) == pytest.approx(one / free), "one that never ran goes by the other"
    assert not was_tried(trials[:1], waiting)
    failed = [*trials[1:], Trial(ONE, free, (0.0,))]
    assert correction(failed, ONE) == 0.0, "but a plan that failed is never fast"
    assert corrected_rate(free, failed, ONE) == 0.0
    # Other plans of these modes, and these in other modes, are other work.
    larger = replace(waiting, encoders={"vision": Degrees(dp=2)})
    assert not ONE.works_as(larger) and not REPLICAS.works_as(replace(REPLICAS, mode="decoupled"))


def test_plans_of_a_shape_err_alike() -> None:
    trials = [Trial(PIPELINE, 10.0, (8.0,)), Trial(REPLICAS, 10.0, (9.0,))]
    longer = replace(PIPELINE, backbone=Degrees(dp=2, pp=4))
    both = replace(PIPELINE, backbone=Degrees(dp=2, pp=2, tp=2))
    assert correction(trials, longer) == pytest.approx(0.8) and not was_tried(trials, longer)
    assert correction(trials, replace(REPLICAS, settings=replace(SETTINGS, microbatch_tokens=2048))) == pytest.approx(
        0.9
    )
    # Nothing of this shape ran, nor with such a group: the most that any prediction was off, or the least.
    assert correction(trials, both) == pytest.approx(0.8)
    assert correction(trials, both, may_be_tried=True) == pytest.approx(0.9)
    # Another mode has such a pipeline.
    for may_be_tried in (False, True):
        assert correction(trials, replace(longer, mode="monolithic"), may_be_tried=may_be_tried) == pytest.approx(0.8)
        assert correction(trials, ONE, may_be_tried=may_be_tried) == pytest.approx(0.9)


def test_a_plan_that_failed_is_never_fast_and_says_nothing_of_others() -> None:
    trials = [Trial(PIPELINE, 10.0, (12.0, 0.0, 0.0)), Trial(ONE, 10.0, (9.0,))]
    assert trials[0].measured == 0.0 and correction(trials, PIPELINE) == 0.0
    assert correction(trials, replace(PIPELINE, settings=None)) == pytest.approx(0.9)


def test_trials_are_read_as_they_were_written() -> None:
    trial = Trial(replace(ONE, encoder_layers="own"), 10.0, (9.0, 9.5))
    assert TypeAdapter(Trial).validate_python(json.loads(json.dumps(asdict(trial)))) == trial
    with pytest.raises(ValidationError, match="rates"):
        TypeAdapter(Trial).validate_python({**asdict(trial), "rates": []})
