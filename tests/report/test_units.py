"""Numbers that people read, and ticks of axes."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.observability.report.units import (
    NBSP,
    duration,
    log_ticks,
    moment,
    nice_ticks,
    number,
    percent,
    scaled,
    tick_labels,
)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (number(None), "\u2013"),
        (number(math.inf), "\u2013"),
        (number(0.0), "0"),
        (number(2.58749, 4), "2.587"),
        (number(12_345.6), "12,346"),
        (number(0.00123), "0.00123"),
        (number(1.5e-9), "1.5e-09"),
        (percent(0.0314), "3.1 %"),
        (percent(0.831), "83 %"),
        (percent(0.0), "0 %"),
        (duration(0.0), "0 s"),
        (duration(0.0852), "85.2 ms"),
        (duration(12.34), "12.3 s"),
        (duration(185), "3 min 05 s"),
        (duration(3_725), "1 h 02 min"),
        (duration(90_000), "1 d 1 h"),
        (scaled(3_201.0, "si", "tokens/s"), "3.20 k tokens/s"),
        (scaled(42.0, "si", "samples/s"), "42.0 samples/s"),
        (scaled(1536.0, "nbytes"), "1.50 KiB"),
        (scaled(7.0, "nbytes"), "7.00 B"),
        (scaled(0.5, "share"), "50 %"),
        (moment(1_795_000_000.0), "2026-11-18 11:06:40 UTC"),
        (moment(-1.0), "\u2013"),
    ],
)
def test_what_people_read(shown: str, expected: str) -> None:
    assert shown.replace(NBSP, " ") == expected


@given(st.floats(-1e15, 1e15), st.floats(1e-9, 1e15), st.integers(1, 12))
def test_ticks_are_in_the_range_ascending_and_few(low: float, span: float, most: int) -> None:
    ticks = nice_ticks(low, low + span, most)
    assert len(ticks) <= most + 2
    assert ticks == sorted(ticks)
    room = 1e-6 * (abs(low) + span)
    assert all(low - room <= tick <= low + span + room for tick in ticks)
    assert len(tick_labels(ticks)) == len(ticks)


@given(st.integers(0, 10**7), st.integers(1, 10**7), st.integers(1, 12))
def test_ticks_of_steps_are_whole(low: int, span: int, most: int) -> None:
    ticks = nice_ticks(float(low), float(low + span), most, whole=True)
    assert all(tick == round(tick) and low <= tick <= low + span for tick in ticks)
    assert len(set(tick_labels(ticks))) == len(ticks) <= most + 2


@given(st.floats(0, 1e6), st.floats(1e-3, 1e6), st.integers(2, 8))
def test_labels_of_ticks_differ_and_are_close_to_them(low: float, span: float, most: int) -> None:
    ticks = nice_ticks(low, low + span, most)
    gaps = [later - earlier for earlier, later in pairwise(ticks)]
    if not gaps or min(gaps) < 1e-5 * max(ticks):
        return
    labels = tick_labels(ticks)
    assert len(set(labels)) == len(labels)
    for tick, label in zip(ticks, labels, strict=True):
        assert float(label.replace(",", "")) == pytest.approx(tick, abs=0.01 * min(gaps))


def test_ticks_of_ranges_that_have_no_width() -> None:
    assert nice_ticks(3.0, 3.0, 5) == [3.0]
    assert nice_ticks(math.nan, 1.0, 5) == []
    assert nice_ticks(0.0, 5e-324, 3) == [0.0]
    assert tick_labels([0.0, 2.5, 5.0]) == ["0.0", "2.5", "5.0"]
    assert tick_labels([0.0, 50_000.0, 100_000.0]) == ["0", "50,000", "100,000"]
    assert log_ticks(0.5, 2000.0) == [1.0, 10.0, 100.0, 1000.0]
