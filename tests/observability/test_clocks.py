"""Clock offsets: the truth is always within the error, and the error within half of a round trip."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.observability import clocks
from flowtrain.observability.clocks import MAX_DRIFT, ClockOffset, monotonic_clock_name

ROUNDING_S = 1e-6

delays = st.floats(0.0, 0.5)
trips = st.lists(st.tuples(st.floats(0.0, 300.0), delays, delays), min_size=1, max_size=30)
"""Seconds since the trip before, of the question, and of the answer."""


@given(trips, st.floats(-1e5, 1e5), st.floats(-MAX_DRIFT, MAX_DRIFT))
def test_the_error_is_at_most_half_of_a_round_trip(
    trips: list[tuple[float, float, float]], offset_s: float, drift: float
) -> None:
    measured, now_s = ClockOffset(), 1000.0

    def there(here_s: float) -> float:
        return here_s + offset_s + drift * (here_s - 1000.0)

    for pause_s, question_s, answer_s in trips:
        sent_s = now_s + pause_s
        now_s = sent_s + question_s + answer_s
        measured.round_trip(sent_s, there(sent_s + question_s), now_s)
        # What the clocks moved apart during the trip itself counts as its error.
        moved_s = MAX_DRIFT * (question_s + answer_s)
        assert measured.error_s <= (question_s + answer_s) / 2 + ROUNDING_S
        assert abs(measured.value_s - (there(now_s) - now_s)) <= measured.error_s + moved_s + ROUNDING_S


def test_the_fastest_round_trip_decides() -> None:
    measured = ClockOffset(max_drift=0.0)
    for question_s, answer_s in ((0.5, 0.5), (0.001, 0.001), (0.0, 1.0), (1.0, 0.0)):
        measured.round_trip(0.0, 40.0 + question_s, question_s + answer_s)
        assert measured.error_s <= (question_s + answer_s) / 2 + ROUNDING_S
    assert measured.value_s == pytest.approx(40.0, abs=0.001) and measured.error_s <= 0.001 + ROUNDING_S


def test_a_clock_that_was_set_is_measured_anew() -> None:
    measured = ClockOffset(max_drift=0.0)
    measured.round_trip(0.0, 10.0, 0.002)
    measured.round_trip(1.0, 5.0, 1.004)
    assert measured.value_s == pytest.approx(3.998) and measured.error_s == pytest.approx(0.002)


def test_processes_of_one_kernel_have_one_clock() -> None:
    assert monotonic_clock_name() == monotonic_clock_name()


def test_a_kernel_that_does_not_say_which_it_is_shares_no_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clocks, "_BOOT", tmp_path / "none")
    assert monotonic_clock_name() != monotonic_clock_name()


def test_a_time_namespace_has_a_clock_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boot, one, two = tmp_path / "boot", tmp_path / "one", tmp_path / "two"
    boot.write_text("0123\n")
    one.symlink_to("time:[1]")
    two.symlink_to("time:[2]")
    monkeypatch.setattr(clocks, "_BOOT", boot)
    names = []
    for namespace in (one, two, tmp_path / "an old kernel has none"):
        monkeypatch.setattr(clocks, "_NAMESPACE", namespace)
        names.append(monotonic_clock_name())
    assert names == ["0123 time:[1]", "0123 time:[2]", "0123"]
