"""The window of ``arrival`` order: every position once, none too late, the oldest first, through any resume."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.flow.consumed import ConsumedPositions
from flowtrain.flow.order import ArrivalWindow

Ready = Callable[[int, int], bool]
"""(step, position) -> whether the position is ready when a rank asks for the step, without any wait."""


@dataclass
class Run:
    """Steps of ``batch`` positions; ``total`` positions are trained. Groups are sized as far ahead as by the feeder."""

    batch: int
    total: int
    window: int
    close_every: tuple[int, ...]
    taken: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        return -(-self.total // self.batch)

    def group(self, step: int) -> range:
        return range((step - 1) * self.batch, min(step * self.batch, self.total))

    def closes(self, step: int) -> bool:
        return step == self.num_steps or any(step % every == 0 for every in self.close_every)

    def run(self, start: int, until: int, is_ready: Ready) -> None:
        """Resume after ``start`` steps from what they consumed, and run until ``until`` steps are done."""
        consumed = ConsumedPositions()
        for step in range(1, start + 1):
            consumed.add(self.taken[step])
        window = ArrivalWindow(self.window, self.num_steps, self.close_every)
        sized = consumed.frontier // self.batch
        for step in range(start + 1, until + 1):
            while sized < min(step + self.window, self.num_steps):
                sized += 1
                window.add_group(sized, [p for p in self.group(sized) if p not in consumed])
            self.taken[step] = self.choose(window, step, is_ready)
            consumed.add(self.taken[step])

    def choose(self, window: ArrivalWindow, step: int, is_ready: Ready) -> tuple[int, ...]:
        """Return what a step takes. If too little is ready, one position after another becomes ready."""
        size = len(self.group(step))
        waiting = [p for p in window.open_positions(self.num_steps) if not is_ready(step, p)]
        while (chosen := window.choose(step, size, lambda p: p not in waiting)) is None:
            waiting.pop(0)
        return chosen


@st.composite
def runs(draw: st.DrawFn) -> tuple[Run, Ready]:
    batch = draw(st.integers(1, 5))
    total = draw(st.integers(1, 40))
    run = Run(batch, total, draw(st.integers(1, 4)), tuple(draw(st.lists(st.integers(1, 5), max_size=2))))
    rng, share = random.Random(draw(st.integers(0, 1 << 16))), draw(st.sampled_from([0.2, 0.5, 0.9]))
    ready = [[rng.random() < share for _ in range(7)] for _ in range(5)]
    return run, lambda step, position: ready[step % 5][position % 7]


@given(runs())
@settings(deadline=None)
def test_every_position_runs_once_and_none_too_late(run_and_ready: tuple[Run, Ready]) -> None:
    run, is_ready = run_and_ready
    run.run(0, run.num_steps, is_ready)
    assert sorted(p for positions in run.taken.values() for p in positions) == list(range(run.total))
    for step, positions in run.taken.items():
        assert list(positions) == sorted(positions) and len(positions) == len(run.group(step))
        assert all(abs(step - (1 + p // run.batch)) <= run.window for p in positions)
    done: set[int] = set()
    for step in range(1, run.num_steps + 1):
        done.update(run.taken[step])
        if run.closes(step):
            assert done == set(range(min(step * run.batch, run.total)))


@given(runs(), st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), max_size=4))
@settings(deadline=None)
def test_a_resume_after_any_step_loses_nothing_and_repeats_nothing(
    run_and_ready: tuple[Run, Ready], kills: list[tuple[int, int]]
) -> None:
    """Kill the run after some steps; some of them come after the last checkpoint."""
    run, is_ready = run_and_ready
    step = 0
    for at, lost in kills:
        until = min(max(at, step), run.num_steps)
        run.run(step, until, is_ready)
        step = max(until - lost, 0)
    run.run(step, run.num_steps, is_ready)
    assert sorted(p for positions in run.taken.values() for p in positions) == list(range(run.total))
    for step, positions in run.taken.items():
        assert all(abs(step - (1 + p // run.batch)) <= run.window for p in positions)


@given(runs())
@settings(deadline=None)
def test_where_everything_is_ready_steps_run_in_order(run_and_ready: tuple[Run, Ready]) -> None:
    run, _ = run_and_ready
    run.run(0, run.num_steps, lambda step, position: True)
    assert all(list(run.taken[step]) == list(run.group(step)) for step in run.taken)


def window_of(num_groups: int, *, window: int = 1, close_every: tuple[int, ...] = ()) -> ArrivalWindow:
    """Return a window with groups of three positions; the run has more after them."""
    made = ArrivalWindow(window, 100, close_every)
    for step in range(1, num_groups + 1):
        made.add_group(step, range((step - 1) * 3, step * 3))
    return made


def test_what_is_ready_goes_before_what_is_older() -> None:
    window = window_of(2)
    assert window.choose(1, 3, lambda p: p in (1, 4)) is None
    assert window.open_positions(1) == (0, 1, 2), "a choice that fails takes nothing"
    assert window.choose(1, 3, lambda p: p in (1, 3, 4, 5)) == (1, 3, 4), "the oldest of those that are ready"


def test_what_must_run_now_is_taken_unready() -> None:
    window = window_of(3)
    assert window.choose(1, 3, lambda p: p > 2) == (3, 4, 5)
    assert window.choose(2, 3, lambda p: False) == (0, 1, 2)


def test_a_step_before_an_evaluation_takes_all_that_is_left_and_nothing_from_after_it() -> None:
    window = window_of(3, close_every=(2,))
    assert window.choose(1, 3, lambda p: p > 4) is None, "positions of step 3 wait for the evaluation"
    assert window.choose(1, 3, lambda p: p in (0, 4, 5, 6)) == (0, 4, 5)
    assert window.choose(2, 3, lambda p: p > 5) == (1, 2, 3)
    assert window.choose(3, 3, lambda p: True) == (6, 7, 8)


def test_a_window_made_smaller_by_a_resume_runs_the_oldest_first() -> None:
    window = window_of(4)
    assert window.choose(4, 3, lambda p: p > 8) == (0, 1, 2), "three groups are overdue"
    assert window.choose(5, 3, lambda p: False) == (3, 4, 5)


@pytest.mark.parametrize(("step", "deadline"), [(1, 3), (2, 4), (3, 4), (4, 4), (5, 7), (98, 100), (100, 100)])
def test_deadlines_end_at_evaluations_and_at_the_last_step(step: int, deadline: int) -> None:
    assert ArrivalWindow(2, 100, [4]).deadline(step) == deadline


def test_of_several_held_out_sets_the_first_that_is_due_closes_the_window() -> None:
    window = ArrivalWindow(4, 100, {6, 4})
    assert [window.deadline(step) for step in (1, 4, 5, 6, 7, 9)] == [4, 4, 6, 6, 8, 12]


def test_groups_come_in_order() -> None:
    window = window_of(2)
    with pytest.raises(AssertionError):
        window.add_group(2, [3])
