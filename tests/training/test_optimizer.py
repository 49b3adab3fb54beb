"""Parameter groups, schedules, clipping, bookkeeping of the loss, the measured peak."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.config.training import TrainingConfig
from flowtrain.training.loss import UnitTotals, actual_denominator, planned_denominator
from flowtrain.training.optimizer import (
    build_optimizer,
    clip_factor,
    gradients_of,
    learning_rate_factor,
    scale_gradients,
    set_learning_rate,
    sum_of_squares,
)
from flowtrain.training.peak import measure_peak_flops
from tests.training.ranks import TinyFamily, make_batch, make_config, make_plan


def training(**values: object) -> TrainingConfig:
    return TrainingConfig.model_validate({"max_steps": 1, **values})


def test_groups_by_module_and_dimension():
    model = TinyFamily().load_backbone()
    config = training(learning_rate=1e-3, learning_rates={"connector": 1e-2}, weight_decay=0.1)
    optimizer = build_optimizer(model.named_parameters(), config)
    settings_of = {p: (g["peak_lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    assert len(settings_of) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        decays = not name.endswith("bias") and "norm" not in name
        peak_lr = 1e-2 if name.startswith("connector.") else 1e-3
        assert settings_of[parameter] == (peak_lr, 0.1 if decays else 0.0), name
    set_learning_rate(optimizer, 0.5)
    assert {group["lr"] for group in optimizer.param_groups} == {5e-3, 5e-4}


def test_a_learning_rate_of_zero_for_a_module_is_not_mistaken_for_none():
    optimizer = build_optimizer(
        TinyFamily().load_backbone().named_parameters(), training(learning_rates={"backbone": 0.0})
    )
    assert {group["peak_lr"] for group in optimizer.param_groups} == {0.0, 1e-4}


def test_frozen_modules_are_left_out():
    optimizer = build_optimizer(TinyFamily(freeze=("backbone",)).load_backbone().named_parameters(), training())
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 4


def test_a_stage_without_trainable_parameters_has_an_optimizer_that_does_nothing():
    optimizer = build_optimizer([], training())
    set_learning_rate(optimizer, 0.5)
    optimizer.step()
    assert gradients_of(optimizer) == []


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.775, 0.55, 0.325]),
        ("cosine", [0.5, 1, 1, 0.8682, 0.55, 0.2318]),
    ],
)
def test_schedules(schedule, expected):
    config = training(lr_schedule=schedule, warmup_steps=2, min_learning_rate_ratio=0.1)
    assert [learning_rate_factor(step, 6, config) for step in range(1, 7)] == pytest.approx(expected, abs=1e-4)


@given(
    st.sampled_from(["constant", "linear", "cosine"]),
    st.integers(1, 60),
    st.integers(0, 80),
    st.floats(0, 1),
)
@settings(deadline=None)
def test_schedules_rise_then_fall_within_their_bounds(schedule, num_steps, warmup_steps, floor):
    config = training(lr_schedule=schedule, warmup_steps=warmup_steps, min_learning_rate_ratio=floor)
    factors = [learning_rate_factor(step, num_steps, config) for step in range(1, num_steps + 1)]
    rising, falling = factors[:warmup_steps], factors[warmup_steps:]
    assert rising == sorted(rising) and all(0 < factor <= 1 for factor in rising)
    assert falling == sorted(falling, reverse=True) and all(floor - 1e-12 <= factor <= 1 for factor in falling)
    assert not falling or falling[0] == 1.0


@pytest.mark.parametrize("max_norm", [0.0, 1.0, 100.0])
def test_clipping_as_torch_does_it(max_norm):
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(3, 2)), torch.nn.Parameter(torch.zeros(5))]
    originals = [torch.randn_like(parameter) for parameter in parameters]
    for parameter, original in zip(parameters, originals, strict=True):
        parameter.grad = original.clone()
    gradients = [original.clone() for original in originals]
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm or float("inf"))
    found = math.sqrt(sum_of_squares(gradients))
    assert found == pytest.approx(norm.item())
    scale_gradients(gradients, clip_factor(found, max_norm))
    for gradient, parameter in zip(gradients, parameters, strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_no_gradients_have_no_norm():
    assert sum_of_squares([]) == 0.0 and clip_factor(0.0, 1.0) == 1.0


def test_denominators_follow_what_was_planned_and_what_was_run():
    plan = make_plan((((0, 1), (2,)),), step=1)
    totals = UnitTotals()
    for positions in ((0, 1), ()):
        totals = totals.plus(make_batch(positions, make_config()))
    assert (planned_denominator(plan, "token"), planned_denominator(plan, "sample")) == (plan.num_target_tokens, 3)
    expected = sum(sample.num_target_tokens for sample in plan.slots[0][0].samples)
    assert (actual_denominator(totals, "token"), actual_denominator(totals, "sample")) == (expected, 2)
    assert UnitTotals.from_tensor(totals.to_tensor()) == totals
    empty = make_plan((((), ()),), step=1)
    assert (planned_denominator(empty, "token"), actual_denominator(UnitTotals(), "token")) == (1, 0)


def test_the_measured_peak_is_a_rate():
    assert 1e8 < measure_peak_flops(torch.device("cpu"), torch.float32, size=128) < 1e16


def test_the_norm_of_a_large_tensor_is_exact():
    gradient = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0))
    assert sum_of_squares([gradient]) == pytest.approx(float(gradient.double().square().sum()), rel=1e-6)
