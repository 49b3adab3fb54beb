"""Steps of encoders and backbone: nothing gets slower by more freedom, and nothing runs before it may."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.allocator.drawn_flow import DrawnStep, finishes
from flowtrain.simulator.encoders import EncodedStep
from flowtrain.simulator.pace import Pace

SECONDS = st.floats(0.0, 4.0)


@st.composite
def drawn_steps(draw: st.DrawFn, encoders: int = 1) -> list[DrawnStep]:
    steps = []
    for _ in range(draw(st.integers(1, 4))):
        slots = draw(st.lists(SECONDS, min_size=1, max_size=5))
        encoded = []
        for _ in range(encoders):
            seconds = draw(st.lists(SECONDS, max_size=6))
            needed = sorted(draw(st.lists(st.integers(0, len(seconds)), min_size=len(slots), max_size=len(slots))))
            needed[-1] = len(seconds)
            encoded.append(EncodedStep(np.array(seconds, dtype=float), np.array(needed)))
        shared = draw(SECONDS)
        steps.append(DrawnStep(np.array(slots), draw(SECONDS), tuple(encoded), shared, shared and draw(SECONDS)))
    return steps


def ends_of(steps: list[DrawnStep], replicas: list[int], lookahead: int = 2, is_barrier: bool = False) -> np.ndarray:
    return finishes(steps, replicas, lookahead, is_barrier=is_barrier, num_steps=12)


@given(steps=drawn_steps(2), replicas=st.tuples(st.integers(1, 4), st.integers(1, 4)), lookahead=st.integers(1, 3))
def test_freedom_never_delays_a_step(steps: list[DrawnStep], replicas: tuple[int, int], lookahead: int) -> None:
    ends = ends_of(steps, [*replicas], lookahead)
    same = 1e-9 * (1.0 + ends)
    assert (ends <= ends_of(steps, [*replicas], lookahead, is_barrier=True) + same).all(), "a barrier made it faster"
    assert (ends_of(steps, [*replicas], lookahead + 1) <= ends + same).all(), "more lookahead made it slower"
    assert (ends_of(steps, [replicas[0] + 1, replicas[1]], lookahead) <= ends + same).all(), "a replica made it slower"


@given(steps=drawn_steps(), replicas=st.integers(1, 4), is_barrier=st.booleans())
def test_no_step_is_shorter_than_its_work(steps: list[DrawnStep], replicas: int, is_barrier: bool) -> None:
    ends = ends_of(steps, [replicas], is_barrier=is_barrier)
    alone = np.array([steps[index % len(steps)].backbone_s for index in range(len(ends))])
    assert (np.diff(np.concatenate([[0.0], ends])) >= alone - 1e-9).all()
    encoding = np.cumsum([sum(steps[index % len(steps)].encoded[0].seconds) for index in range(len(ends))])
    assert (ends >= encoding / replicas - 1e-9).all()


@given(
    steps=drawn_steps(2),
    replicas=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    lookahead=st.integers(0, 3),
    is_barrier=st.booleans(),
)
def test_steps_that_found_their_pace_go_on_as_if_all_were_timed(
    steps: list[DrawnStep], replicas: tuple[int, int], lookahead: int, is_barrier: bool
) -> None:
    asked = {"is_barrier": is_barrier, "num_steps": 40}
    found = finishes(steps, [*replicas], lookahead, **asked)
    with patch.object(Pace, "is_found", return_value=False):
        expected = finishes(steps, [*replicas], lookahead, **asked)
    np.testing.assert_allclose(found, expected, rtol=1e-7)


def test_few_steps_are_timed_where_they_repeat() -> None:
    """Encoders that are always ahead find their pace in the first steps."""
    timed: list[int] = []

    class Counting(Pace):
        def is_found(self, ends: np.ndarray, free: Sequence[np.ndarray], waited_s: float) -> bool:
            timed.append(len(ends))
            return super().is_found(ends, free, waited_s)

    with patch("flowtrain.allocator.drawn_flow.Pace", Counting):
        ends = finishes([step([3.0, 3.0], [1.0, 1.0], [1, 2])], [1], 1, is_barrier=False, num_steps=40)
    assert timed[-1] < 6
    assert ends.tolist() == [1.0 + 6.0 * count for count in range(1, 41)]


def test_a_shared_device_that_falls_behind_later_has_not_found_its_pace() -> None:
    """Steps of 2 seconds, for which it works 2.1 seconds: it is late after the steps that were encoded ahead."""
    one = DrawnStep(np.array([2.0]), 0.0, (EncodedStep(np.array([0.1]), np.array([1])),), 2.0, 0.1)
    ends = finishes([one], [1], 2, is_barrier=False, num_steps=60)
    assert float(ends[-1] - ends[29]) / 30 == pytest.approx(2.1)


def step(slots: list[float], seconds: list[float], needed: list[int], rest_s: float = 0.0) -> DrawnStep:
    return DrawnStep(np.array(slots), rest_s, (EncodedStep(np.array(seconds, dtype=float), np.array(needed)),))


def test_a_slot_waits_for_its_own_images_alone() -> None:
    """Two slots of a second, each needs an encode batch of a second: the second is encoded while the first runs."""
    one = step([1.0, 1.0], [1.0, 1.0], [1, 2])
    assert finishes([one], [1], 1, is_barrier=False, num_steps=2).tolist() == [3.0, 5.0]
    assert finishes([one], [1], 1, is_barrier=True, num_steps=2).tolist() == [4.0, 6.0]


def test_a_barrier_costs_the_slower_side_of_each_step() -> None:
    """A step of long pictures after one of short ones, one step ahead: encoding and training alternate in length."""
    images, text = step([1.0], [5.0], [1]), step([5.0], [1.0], [1])
    ends = finishes([images, text], [1], 1, is_barrier=True, num_steps=12)
    ahead = finishes([images, text], [1], 4, is_barrier=True, num_steps=12)
    assert ends[-1] - ends[5] == pytest.approx(3 * 6.0, abs=5.0)
    assert ahead[-1] <= ends[-1]


def test_one_encode_batch_a_step_keeps_few_replicas_busy() -> None:
    """With a lookahead of one step, at most two steps are encoded at once, however many replicas there are."""
    one = step([0.1], [4.0], [1])
    ends = finishes([one], [8], 1, is_barrier=False, num_steps=20)
    assert float(ends[-1] - ends[9]) / 10 == pytest.approx((4.0 + 0.1) / 2, rel=0.02)


def test_a_shared_device_does_the_work_of_both() -> None:
    """What a backbone leaves free is the encoders': 2 of 3 seconds busy and 2 seconds to encode are 4 seconds."""
    one = DrawnStep(np.array([2.0]), 1.0, (EncodedStep(np.array([2.0]), np.array([1])),), 2.0, 2.0)
    ends = finishes([one], [1], 2, is_barrier=False, num_steps=20)
    assert float(ends[-1] - ends[9]) / 10 == pytest.approx(4.0)
    little = DrawnStep(np.array([2.0]), 1.0, (EncodedStep(np.array([0.5]), np.array([1])),), 2.0, 0.5)
    ends = finishes([little], [1], 2, is_barrier=False, num_steps=20)
    assert float(ends[-1] - ends[9]) / 10 == pytest.approx(3.0), "hidden in the backbone's waits"
