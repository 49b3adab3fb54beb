"""Idle seconds of encoders, cut into the units of a run."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.flow.idle import IdleTime

gaps = st.floats(0.0, 10.0)
notes = st.tuples(st.integers(0, 3), st.booleans())


def test_a_wait_counts_in_each_unit_as_far_as_it_lies_in_it() -> None:
    idle = IdleTime()
    idle.note(0, True, 1.0)
    assert idle.take(0.0, 3.0) == 2.0
    assert idle.take(3.0, 4.0) == 1.0, "the wait goes on"
    idle.note(0, False, 4.5)
    assert idle.take(4.0, 6.0) == 0.5
    assert idle.take(6.0, 9.0) == 0.0


def test_what_lies_between_two_units_counts_in_neither() -> None:
    """Nobody measures an evaluation or a restart as part of a step."""
    idle = IdleTime()
    idle.note(0, True, 0.0)
    idle.note(0, False, 9.0)
    assert idle.take(2.0, 3.0) == 1.0
    assert idle.take(8.0, 10.0) == 1.0


@given(events=st.lists(st.tuples(gaps, st.one_of(notes, st.none()))))
def test_units_share_all_idle_time(events: list[tuple[float, tuple[int, bool] | None]]) -> None:
    """None ends a unit. Each encoder is idle for at most the unit's time, and all units together lose nothing."""
    idle, now_s, started_s = IdleTime(), 0.0, 0.0
    since: dict[int, float] = {}
    total_s: dict[int, float] = defaultdict(float)
    taken_s = 0.0
    for gap_s, event in events:
        now_s += gap_s
        if event is None:
            found = idle.take(started_s, now_s)
            assert -1e-9 <= found <= 4 * (now_s - started_s) + 1e-9
            taken_s, started_s = taken_s + found, now_s
            continue
        owner, is_idle = event
        idle.note(owner, is_idle, now_s)
        if is_idle:
            since.setdefault(owner, now_s)
        elif owner in since:
            total_s[owner] += now_s - since.pop(owner)
    taken_s += idle.take(started_s, now_s)
    expected = sum(total_s.values()) + sum(now_s - each for each in since.values())
    assert taken_s == pytest.approx(expected, abs=1e-6)
