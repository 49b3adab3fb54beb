"""Which losses are spikes."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from flowtrain.training.spikes import LEAST_DEVIATION, LEAST_STEPS, MOST_DEVIATIONS, WINDOW_STEPS, LossWindow

losses = st.floats(0.01, 20.0)
windows = st.lists(losses, min_size=LEAST_STEPS, max_size=2 * WINDOW_STEPS)


@given(st.lists(losses, max_size=LEAST_STEPS - 1), st.floats(0, 1e30))
def test_the_first_steps_have_no_spikes(known: list[float], loss: float) -> None:
    assert not LossWindow(known).is_spike(loss)


@given(windows)
def test_the_limit_is_above_most_of_the_window(known: list[float]) -> None:
    window = LossWindow(known)
    middle = sorted(known[-WINDOW_STEPS:])[len(known[-WINDOW_STEPS:]) // 2]
    assert sum(window.is_spike(loss) for loss in known[-WINDOW_STEPS:]) <= WINDOW_STEPS / 2
    assert not window.is_spike(middle) and not window.is_spike(0.0)
    assert window.is_spike(window.limit * 1.001)


@given(windows, st.sampled_from([math.inf, -math.inf, math.nan]))
def test_a_loss_that_is_not_finite_is_no_spike(known: list[float], loss: float) -> None:
    assert not LossWindow(known).is_spike(loss)


@given(st.floats(0.5, 10), st.integers(LEAST_STEPS, WINDOW_STEPS), st.floats(1.5, 1e6))
def test_a_loss_that_hardly_moves_has_a_limit_of_its_own_size(level: float, count: int, factor: float) -> None:
    window = LossWindow([level] * count)
    assert math.isclose(window.limit, level * (1 + MOST_DEVIATIONS * LEAST_DEVIATION))
    assert window.is_spike(level * factor)


@given(st.lists(st.floats(1.9, 2.1), min_size=WINDOW_STEPS, max_size=WINDOW_STEPS), st.integers(0, WINDOW_STEPS // 4))
def test_a_few_wild_losses_hide_no_spike(known: list[float], num_wild: int) -> None:
    window = LossWindow([*known[num_wild:], *[1000.0] * num_wild])
    assert window.is_spike(10.0)


@given(st.lists(losses, max_size=3 * WINDOW_STEPS))
def test_it_is_the_same_however_it_was_filled(known: list[float]) -> None:
    added, given_at_once, replaced = LossWindow(), LossWindow(known), LossWindow([1.0] * 30)
    for loss in known:
        added.add(loss)
    replaced.replace(known[-WINDOW_STEPS:])
    assert added.limit == given_at_once.limit == replaced.limit
