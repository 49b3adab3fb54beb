"""Stragglers are named, once, and nobody else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.flow.stragglers import (
    BACK_RATIO,
    LEAST_PIECES,
    LEAST_WORKERS,
    MOST_DEVIATIONS,
    SLOW_RATIO,
    WINDOW,
    StragglerWatch,
    limits_of,
)

paces = st.floats(1e-6, 1e6)


def watch_of(pace_of: dict[str, float], pieces: int = WINDOW) -> StragglerWatch:
    watch = StragglerWatch()
    for number in range(pieces):
        for name, pace in pace_of.items():
            work = 1.0 + number % 5
            watch.add(name, pace * work, work)
    return watch


@given(st.floats(1e-6, 1e6), st.lists(st.floats(0.9, 1.1), min_size=LEAST_WORKERS - 1, max_size=40), st.floats(3, 100))
def test_one_slow_worker_among_equals_is_named_once(unit: float, others: list[float], ratio: float) -> None:
    watch = watch_of({f"encoder-{index}": unit * pace for index, pace in enumerate(others)} | {"slow": unit * ratio})
    (found,) = watch.found()
    assert found.name == "slow" and found.ratio > 2 and found.num_workers == len(others) + 1
    assert watch.found() == ()


@given(st.floats(1e-6, 1e6), st.lists(st.floats(0.85, 1.15), min_size=1, max_size=40))
def test_nobody_is_named_among_equals(unit: float, workers: list[float]) -> None:
    assert watch_of({str(index): unit * pace for index, pace in enumerate(workers)}).found() == ()


@given(st.lists(paces, min_size=LEAST_WORKERS, max_size=20))
def test_fewer_than_half_are_ever_named_and_each_is_slow(values: list[float]) -> None:
    usual, limit = limits_of(values)
    assert limit >= SLOW_RATIO * usual
    found = watch_of({str(index): pace for index, pace in enumerate(values)}).found()
    assert len(found) <= len(values) / 2
    assert all(each.ratio >= SLOW_RATIO * (1 - 1e-9) for each in found)
    assert [each.ratio for each in found] == sorted((each.ratio for each in found), reverse=True)


@given(st.lists(paces, min_size=LEAST_WORKERS, max_size=20), st.integers(0, 6))
def test_the_unit_of_time_does_not_matter(values: list[float], exponent: int) -> None:
    scale = 2.0**exponent  # exact, so that no limit is rounded
    found = watch_of({str(index): pace for index, pace in enumerate(values)}).found()
    scaled = watch_of({str(index): pace * scale for index, pace in enumerate(values)}).found()
    assert [each.name for each in found] == [each.name for each in scaled]


@given(st.lists(st.floats(0.9, 1.1), min_size=LEAST_WORKERS, max_size=10), st.integers(1, (LEAST_PIECES - 1) // 2))
def test_a_few_odd_pieces_make_no_straggler(workers: list[float], num_odd: int) -> None:
    watch = watch_of({str(index): pace for index, pace in enumerate(workers)}, pieces=WINDOW - num_odd)
    for _ in range(num_odd):
        watch.add("0", 1e6, 1.0)
    assert watch.found() == ()


def test_with_too_few_pieces_or_workers_nothing_is_said() -> None:
    three = {"a": 1.0, "b": 1.0, "c": 9.0}
    assert watch_of(three, pieces=LEAST_PIECES - 1).found() == ()
    assert watch_of(three, pieces=LEAST_PIECES).found()
    assert watch_of({"a": 1.0, "c": 9.0}).found() == ()


def test_a_spread_that_is_wide_anyway_needs_more_to_stand_out() -> None:
    spread = [0.5, 0.8, 1.0, 1.2, 1.6]
    usual, limit = limits_of(spread)
    assert usual == 1.0 and limit == pytest.approx(1.0 + MOST_DEVIATIONS * 1.4826 * 0.2)


def test_a_worker_that_recovered_can_be_named_again_and_one_that_is_gone_is_forgotten() -> None:
    watch = watch_of({"a": 1.0, "b": 1.0, "c": 1.0, "d": 3.0})
    assert [each.name for each in watch.found()] == ["d"]
    for pace in (BACK_RATIO - 0.1, 3.0):
        for _ in range(WINDOW):
            watch.add("d", pace, 1.0)
        found = watch.found()
    assert [each.name for each in found] == ["d"]
    watch.forget("d")
    assert watch.found() == () and [each.name for each in watch_of({"a": 1.0, "b": 1.0, "c": 9.0}).found()] == ["c"]
