"""The consumed positions equal a plain set, take little memory, and survive a checkpoint."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.flow.consumed import ConsumedPositions
from flowtrain.types.samples import SamplerState


@given(st.integers(0, 30), st.sets(st.integers(0, 60)), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_it_is_the_set_of_what_was_added(frontier: int, positions: set[int], rng: object) -> None:
    order = sorted(positions - set(range(frontier)))
    rng.shuffle(order)  # type: ignore[attr-defined]
    consumed = ConsumedPositions(frontier)
    half = len(order) // 2
    consumed.add(order[:half])
    consumed.add(order[half:])
    known = set(range(frontier)) | positions
    assert [p for p in range(70) if p in consumed] == sorted(known) and len(consumed) == len(known)
    assert consumed.frontier not in consumed and all(p > consumed.frontier for p in consumed.ahead)

    for first in range(consumed.frontier + 1):
        state = consumed.state_from(SamplerState(first, counts=(3,)), first)
        kept = SamplerState.from_dict(json.loads(json.dumps(state.to_dict())))
        assert kept == state and kept.counts == (3,)
        again = ConsumedPositions.at(kept)
        assert (again.frontier, again.ahead) == (consumed.frontier, consumed.ahead)


def test_a_new_run_has_consumed_nothing_and_a_run_in_order_what_lies_before() -> None:
    assert len(ConsumedPositions.at(SamplerState(0))) == 0
    assert ConsumedPositions.at(SamplerState(8, counts=(8,))).frontier == 8


def test_a_position_is_consumed_once() -> None:
    consumed = ConsumedPositions(4, ahead=[6])
    for position in (3, 6):
        with pytest.raises(AssertionError):
            consumed.add([position])
    consumed.add(range(4, 6))
    assert (consumed.frontier, consumed.ahead) == (7, ())
