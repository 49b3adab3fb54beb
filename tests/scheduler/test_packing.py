"""Packing: the segment tree against a plain set, best fit against a linear scan."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.errors import ConfigError
from flowtrain.scheduler.packing.best_fit import best_fit
from flowtrain.scheduler.packing.registry import PACKERS, get_packer
from flowtrain.scheduler.packing.segment_tree import ResidualTree


@st.composite
def packing_problems(draw: st.DrawFn) -> tuple[list[int], int]:
    capacity = draw(st.integers(1, 40))
    return draw(st.lists(st.integers(1, capacity), max_size=60)), capacity


def linear_best_fit(lengths: list[int], capacity: int) -> tuple[tuple[int, ...], ...]:
    """Best fit as anyone would write it: look at every bin, never close one, first of the tightest wins."""
    bins: list[list[int]] = []
    for index, length in enumerate(lengths):
        residuals = [capacity - sum(lengths[i] for i in members) for members in bins]
        fitting = [number for number, residual in enumerate(residuals) if residual >= length]
        if fitting:
            bins[min(fitting, key=lambda number: residuals[number])].append(index)
        else:
            bins.append([index])
    return tuple(map(tuple, bins))


@settings(deadline=None)
@given(st.integers(1, 33), st.data())
def test_tree_answers_like_a_set(capacity: int, data: st.DataObject) -> None:
    tree, present = ResidualTree(capacity), set()
    residuals = st.integers(1, capacity)
    for adds, residual, need in data.draw(st.lists(st.tuples(st.booleans(), residuals, residuals), max_size=40)):
        if adds:
            tree.add(residual)
            present.add(residual)
        else:
            tree.discard(residual)
            present.discard(residual)
        assert tree.smallest_at_least(need) == min((r for r in present if r >= need), default=0)


@pytest.mark.parametrize("residual", [0, 9])
def test_tree_refuses_what_it_does_not_cover(residual: int) -> None:
    with pytest.raises(AssertionError):
        ResidualTree(8).add(residual)


@settings(deadline=None)
@given(packing_problems())
def test_best_fit_equals_a_linear_scan(problem: tuple[list[int], int]) -> None:
    lengths, capacity = problem
    assert best_fit(lengths, lengths, capacity) == linear_best_fit(lengths, capacity)


def test_best_fit_follows_algorithm_1() -> None:
    # 6 opens a bin (4 left), 5 opens another (5 left); 4 takes the tighter first, 5 the second, 2 opens a third.
    assert best_fit([6, 5, 4, 5, 2], [0.0] * 5, 10) == ((0, 2), (1, 3), (4,))


@pytest.mark.parametrize("name", sorted(PACKERS))
@settings(deadline=None)
@given(problem=packing_problems())
def test_every_method_keeps_the_contract(name: str, problem: tuple[list[int], int]) -> None:
    lengths, capacity = problem
    bins = get_packer(name)(lengths, [float(length) for length in lengths], capacity)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    assert all(members and list(members) == sorted(members) for members in bins)
    assert all(sum(lengths[index] for index in members) <= capacity for members in bins)
    assert bins == get_packer(name)(lengths, [float(length) for length in lengths], capacity)


def test_no_sample_needs_no_bin() -> None:
    assert best_fit([], [], 10) == ()


@pytest.mark.parametrize("length", [0, 11])
def test_best_fit_refuses_a_length_outside_the_capacity(length: int) -> None:
    with pytest.raises(AssertionError):
        best_fit([3, length], [0.0, 0.0], 10)


def test_unknown_method_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.packing \('tightest'\).*best_fit"):
        get_packer("tightest")
