"""A long series keeps its range in the picture; means and intervals are right."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.observability.report.sampling import moving_mean, paired_difference, sample

VALUES = st.floats(-1e12, 1e12) | st.sampled_from([math.nan, math.inf, -math.inf])
SERIES = st.lists(VALUES, max_size=300)


@given(SERIES, st.integers(1, 40), st.lists(st.integers(0, 5), min_size=300, max_size=300))
def test_a_sample_has_at_most_so_many_points_and_keeps_the_range(
    values: list[float], columns: int, gaps: list[int]
) -> None:
    x = np.cumsum(np.array(gaps[: len(values)], float))
    y = np.array(values, float)
    found = sample(x, y, columns)
    finite = y[np.isfinite(y)]
    assert len(found.x) == len(found.low) == len(found.mean) == len(found.high) <= max(columns, 0)
    assert (len(found.x) == 0) == (len(finite) == 0)
    if not len(finite):
        return
    assert found.low.min() == finite.min() and found.high.max() == finite.max()
    assert (found.low <= found.mean).all() and (found.mean <= found.high).all()
    assert (np.diff(found.x) >= 0).all()
    known = x[np.isfinite(y)]
    assert known[0] - 1e-9 <= found.x[0] and found.x[-1] <= known[-1] + 1e-9


@given(st.lists(st.floats(-1e6, 1e6), max_size=40))
def test_a_short_series_stays_as_it_is(values: list[float]) -> None:
    x = np.arange(len(values), dtype=float)
    found = sample(x, np.array(values, float), 40)
    assert found.x.tolist() == x.tolist()
    assert found.low.tolist() == found.mean.tolist() == found.high.tolist() == values
    assert not found.is_reduced


def test_100000_steps_with_one_spike_show_the_spike() -> None:
    y = np.ones(100_000)
    y[77_777] = 9.0
    found = sample(np.arange(100_000.0), y, 480)
    assert len(found.x) == 480 and found.high.max() == 9.0 and found.is_reduced
    assert int(found.high.argmax()) == 77_777 * 480 // 99_999


@given(SERIES, st.integers(1, 50))
def test_a_moving_mean_is_the_mean_of_the_finite_values_around(values: list[float], window: int) -> None:
    found = moving_mean(np.array(values, float), window)
    assert len(found) == len(values)
    scale = max((abs(value) for value in values if math.isfinite(value)), default=1.0) + 1.0
    for place, mean in enumerate(found):
        around = [v for v in values[max(0, place - window // 2) : place + window // 2 + 1] if math.isfinite(v)]
        if around:
            assert mean == pytest.approx(statistics.fmean(around), abs=1e-9 * scale)
        else:
            assert math.isnan(mean)


def test_a_paired_difference_and_its_interval() -> None:
    rng = np.random.default_rng(0)
    found = paired_difference(0.5 + rng.standard_normal(1000))
    assert found.num_pairs == 1000 and found.low is not None and found.high is not None
    assert found.low < 0.5 < found.high and found.is_clear
    assert not paired_difference(rng.standard_normal(1000)).is_clear
    few = paired_difference(np.array([1.0, math.nan, 2.0]))
    assert (few.num_pairs, few.mean, few.low, few.is_clear) == (2, 1.5, None, False)
    assert math.isnan(paired_difference(np.array([math.nan])).mean)


def test_neighbours_that_are_alike_widen_the_interval() -> None:
    rng = np.random.default_rng(1)
    alone = rng.standard_normal(1000)
    runs = np.repeat(rng.standard_normal(100), 10)
    narrow, wide = paired_difference(alone), paired_difference(runs)
    assert narrow.low is not None and narrow.high is not None and wide.low is not None and wide.high is not None
    assert wide.high - wide.low > 1.5 * (narrow.high - narrow.low)
